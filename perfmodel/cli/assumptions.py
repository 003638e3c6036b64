"""`perfmodel assumptions`: constants of a whole training run, with their sources."""

from __future__ import annotations

from perfmodel.cli import options
from perfmodel.cli.known import Sources, table_with_sources
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.report.document import Document


@command(output=options.PLAIN_OUTPUT)
def assumptions(*, sources: Sources = False, output: Output) -> None:
    """List constants of a whole training run: failures, checkpoints, power and carbon. `--tokens` uses them; step times do not.

    `--assume NAME=VALUE` of predict and search replaces one.
    """
    from perfmodel.verbs.training import list_assumptions

    known = list_assumptions()
    rows = [
        (
            constant.name,
            f"{constant.value:g}",
            f"{constant.low:g} to {constant.high:g}",
            "" if constant.unit == "-" else constant.unit,
            constant.means,
            constant.source,
        )
        for constant in known
    ]
    table = table_with_sources(
        ("assumption", "value", "published", "unit", "meaning", "source"),
        rows,
        sources=sources,
        title="Constants of a whole run (--tokens)",
        right=("value",),
        fold=("meaning",),
        named=False,
    )
    show(Document(content=lambda: {"assumptions": known}, blocks=lambda: table), output)
