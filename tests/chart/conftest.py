"""The model configurations that the unit tests size pools with serve here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
