"""Plain-torch references: obvious, not fast. Tests compare every backend with them, bit for bit where promised."""
