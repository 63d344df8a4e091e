"""Help text with the options in sections, as plain text."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typer.core import TyperCommand

__all__ = ["SectionedCommand"]


class SectionedCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each section; those without a section are the last."""
        # typer lists options by panel only if it formats the help with rich, which the `app` does not use.
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_option = parameter.param_type_name == "option"
            title = getattr(parameter, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
            sections[title].append(record)
        for title in sorted(sections, key=lambda name: (name == "Options", name != "Arguments")):
            with formatter.section(title):
                formatter.write_dl(sections[title])
