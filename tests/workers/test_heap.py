import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pagefleet.workers.heap import forget_pages


def resident_kib(path: Path) -> int:
    """Of this process's mappings of a file."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    mappings = [part for part in parts if part.partition("\n")[0].endswith(str(path.resolve()))]
    return sum(int(re.findall(r"^Rss: +(\d+)", mapping, flags=re.M)[0]) for mapping in mappings)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is done")
def test_a_forgotten_file_takes_no_memory_and_reads_the_same(tmp_path: Path):
    path, other = tmp_path / "weights", tmp_path / "weights-2"
    for file in (path, other):
        file.write_bytes(bytes(range(256)) * 4096)
    mapped, kept = (np.memmap(file, dtype=np.uint8, mode="c") for file in (path, other))
    total = int(mapped.sum()), int(kept.sum())
    assert resident_kib(path) == resident_kib(other) == 1024
    forget_pages(path)
    assert (resident_kib(path), resident_kib(other)) == (0, 1024)
    assert (int(mapped.sum()), int(kept.sum())) == total
