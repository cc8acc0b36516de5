"""Plain-torch references: simple, not fast. Tests compare every backend with them, bitwise if promised."""
