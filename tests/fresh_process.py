"""What a process has loaded that begins by importing some of our modules."""

import subprocess
import sys


def loaded_with(*modules: str) -> set[str]:
    """The names of all modules after importing these, of pagefleet, in a process of its own."""
    imports = "".join(f"import pagefleet.{module}\n" for module in modules)
    code = f"import sys\n{imports}print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(output.stdout.split())
