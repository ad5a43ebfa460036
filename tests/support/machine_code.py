"""Reading what the compiler made of a kernel, without a GPU."""

import re
import subprocess
import tempfile
from pathlib import Path

from tilewise.engines.gpu.kernel_cache import load_or_build
from tilewise.engines.gpu.launch import Launch, request_of


def machine_code(launch: Launch, arch: int) -> str:
    """The kernel of a launch, disassembled."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(load_or_build(request_of(launch, arch), launch.table)["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops_of_products(sass: str) -> list[str]:
    """The bodies of the innermost loops in which tensor cores work."""
    lines = sass.splitlines()
    labels = {m.group(1): n for n, line in enumerate(lines) if (m := re.match(r"^(\.L_x_\d+):", line))}
    jumps = [(labels.get(m.group(1), n), n) for n, line in enumerate(lines) if (m := re.search(r"BRA.*`\((\.L_x_\d+)\)", line))]
    loops = [(first, last) for first, last in jumps if first < last]
    innermost = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [body for a, b in innermost if "HGMMA" in (body := "\n".join(lines[a:b]))]
