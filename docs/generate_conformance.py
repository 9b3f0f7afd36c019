"""Write docs/conformance.md from the rules themselves: `make docs`. A test fails while the two differ."""

from __future__ import annotations

from pathlib import Path

from power_conformance import Kind, all_rules, rules_of

PAGE = Path(__file__).with_name("conformance.md")
INTRODUCTION = Path(__file__).with_name("conformance_intro.md")
HEADINGS = {
    Kind.TARGET: "Targets",
    Kind.DRAFTER: "Drafters",
    Kind.ARTIFACT: "Artifact contracts",
    Kind.PLUGIN: "Plugins",
}


def page() -> str:
    """The page as it should be."""
    sections = [INTRODUCTION.read_text(encoding="utf-8").replace("{rules}", str(len(all_rules())))]
    for kind, heading in HEADINGS.items():
        rules = rules_of(kind)
        lines = [f"### {heading} ({len(rules)})", "", "| id | what, and why |", "|---|---|"]
        sections.append("\n".join([*lines, *(f"| `{rule.id}` | {rule.title} |" for rule in rules)]) + "\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
