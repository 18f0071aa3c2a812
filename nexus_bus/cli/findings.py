"""What a check of a dataset found, a line each. Behind `nexus data check` and `nexus data push`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nexus_bus.data.check import Report, Severity

STYLES = {"error": "red", "warning": "yellow", "notice": "dim"}


def tell(report: "Report", out: Any, *severities: "Severity") -> None:
    """Print the findings of these severities to a rich console."""
    from rich.text import Text

    for finding in report.findings:
        if finding.severity in severities:
            named = (("episode ", finding.episode), ("frame ", finding.frame), ("", finding.key))
            where = ", ".join(f"{name}{value}" for name, value in named if value is not None)
            line = Text(f"{finding.severity} ", style=STYLES[finding.severity])
            out.print(line.append(f"{finding.code} {where and f'[{where}] '}{finding.text}", "default"), soft_wrap=True)
    for code, count in report.more.items():
        out.print(f"… and {count} more of {code}", markup=False)


def count(report: "Report") -> str:
    """`1 error, 2 warnings`, and notices where there are any."""
    from nexus_bus.data.check import counted

    notices = report.count("notice")
    words = [counted(report.errors, "error"), counted(report.count("warning"), "warning")]
    return ", ".join(words + ([counted(notices, "notice")] if notices else []))
