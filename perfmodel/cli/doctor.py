"""`perfmodel doctor`: installation, this machine, and improvements of predictions."""

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

    diagnosis = diagnose()

    def blocks() -> Iterator[Block]:
        facts = [("python", diagnosis.python)]
        facts += [(part.name, part.version or f"not installed; needed for {part.needed_for}") for part in diagnosis.parts]
        for gpu in diagnosis.devices:
            state = "calibrated" if gpu.is_calibrated else "not calibrated"
            chip = gpu.chip or "an unknown chip"
            facts.append(("device", f"{gpu.name}: {chip}, {state}{f' ({gpu.calibration})' if gpu.calibration else ''}"))
        facts += list(diagnosis.hardware_data.items())
        facts.append(("your calibrations", diagnosis.calibrations_folder or "no home folder"))
        yield Facts(f"perfmodel {diagnosis.version}", facts)
        yield Text("What would improve predictions:", apart=True)
        yield from (Text(f"- {sentence}") for sentence in diagnosis.advice)

    show(Document(content=lambda: to_plain(diagnosis), blocks=blocks), output)
