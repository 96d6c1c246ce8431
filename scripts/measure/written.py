"""What was measured, as numbers in a file and as tables on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from medusa_heads.files import replace_json


def write_report(output: str, report: Mapping[str, Any], *tables: Table) -> None:
    """Show the tables, and write the report to a JSON file."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, report)
    Console().print(*tables)
    print(f"Written: {path}")
