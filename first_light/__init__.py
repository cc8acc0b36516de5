"""The first half hour on a GPU: every check and measurement that needs one, in three commands, what matters most first.

`make first-light PART=1`, then 2 and 3, on the machine with the GPU; docs/first_light.md says how, and how to send what
comes out. `make carry` packs beforehand what such a machine may lack.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRY = ROOT / "carry"
