"""`perfmodel doctor`: the installation, this machine, and what would improve predictions."""

from __future__ import annotations

from collections.abc import Iterator

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.foundation.plain import to_plain
from perfmodel.report.document import Block, Document, Facts, Text


@command(output=options.PLAIN_OUTPUT)
def doctor(*, output: Output) -> None:
    """Show what is installed, whether this machine is calibrated, its GPUs, the date of hardware data, and what would improve predictions.

    Nothing is changed; the exit code is 0.
    """
    from perfmodel.verbs.doctor import diagnose

    found = diagnose()

    def blocks() -> Iterator[Block]:
        facts = [("python", found.python)]
        facts += [(each.name, each.version or f"not installed; {each.needed_for} need it") for each in found.parts]
        for each in found.devices:
            state = "calibrated" if each.is_calibrated else "not calibrated"
            chip = each.chip or "an unknown chip"
            facts.append(("device", f"{each.name}: {chip}, {state}{f' ({each.calibration})' if each.calibration else ''}"))
        facts += list(found.hardware_data.items())
        facts.append(("your calibrations", found.calibrations_folder or "no home folder"))
        yield Facts(f"perfmodel {found.version}", facts)
        yield Text("What would improve predictions:", apart=True)
        yield from (Text(f"- {each}") for each in found.advice)

    show(Document(content=lambda: to_plain(found), blocks=blocks), output)
