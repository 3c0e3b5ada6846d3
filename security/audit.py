"""What pip-audit says of the environment that this runs in; told apart: nothing known, and nothing looked up.

`python security/audit.py` exits with 1 where a dependency has a known vulnerability that is not in `KNOWN`,
and with 3 where the advisories of none of them could be had.
"""

import json
import subprocess
import sys
from collections.abc import Mapping

#: Advisories that were read and are no matter here, each with its reason.
KNOWN: Mapping[str, str] = {}


def audited(report: Mapping[str, object]) -> tuple[list[str], list[str], list[str]]:
    """What is vulnerable, what was looked up, and what could not be, of a report of pip-audit."""
    vulnerable, looked_up, skipped = [], [], []
    for found in report["dependencies"]:  # type: ignore[attr-defined]
        name = f"{found['name']} {found.get('version', '')}".strip()
        if "skip_reason" in found:
            skipped.append(name)
            continue
        looked_up.append(name)
        for advisory in found["vulns"]:
            if not {advisory["id"], *advisory.get("aliases", ())} & KNOWN.keys():
                fixed = ", ".join(advisory["fix_versions"]) or "nothing yet"
                vulnerable.append(f"{name}: {advisory['id']}, mended in {fixed}")
    return vulnerable, looked_up, skipped


def main() -> int:
    """Audit this environment."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        vulnerable, looked_up, skipped = audited(json.loads(done.stdout))
    except json.JSONDecodeError:
        print(done.stderr, file=sys.stderr)
        return 2
    skipped = [name for name in skipped if not name.startswith("raycrew-")]  # on no index
    print(f"{len(looked_up)} dependencies looked up, {len(skipped)} not, {len(vulnerable)} advisories")
    for line in vulnerable:
        print(line)
    if vulnerable:
        return 1
    return 0 if looked_up else 3


if __name__ == "__main__":
    sys.exit(main())
