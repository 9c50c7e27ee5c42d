"""Runs every benchmark of this folder, one after the other; each prints its own table.

python tests/benchmarks/run_all.py [--json-dir DIR]
"""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-dir", type=Path, help="write each benchmark's JSON there")
    options = parser.parse_args()
    failed: list[str] = []
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        command = [sys.executable, str(script)]
        if options.json_dir is not None:
            options.json_dir.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(options.json_dir / f"{script.stem}.json")]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(script.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
