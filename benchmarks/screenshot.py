"""Take the picture of docs/report.md: three short runs on text that comes with Python, one page."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

from halfword.report import report

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
PRECISIONS = ["fp32-master", "exact", "bf16"]
SETTINGS = (
    "--num_layers 2 --hidden_dim 64 --num_heads 4 --seq_length 64 --batch_size 8 --num_steps 400 "
    "--learning_rate 2e-3 --lr_warmup_steps 20 --log_interval 400 --threads 1 --device cpu"
).split()
SIZE = (1100, 1640)  # down to the bars of memory


def main() -> None:
    """Train, report, photograph."""
    chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if chromium is None:
        sys.exit("screenshot: needs chromium on the PATH (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            options = ["--precision", precision, "--run", f"{folder}/{precision}", *SETTINGS]
            subprocess.run([sys.executable, "-m", "halfword", "train", *options], check=True)
        page, raw = Path(folder, "report.html"), Path(folder, "raw.png")
        report([Path(folder, precision) for precision in PRECISIONS], page, Console())
        photograph(chromium, page, raw)
        # In 256 colours, which a page of lines and text does with, it has a third of the bytes.
        palette = Image.open(raw).convert("RGB").quantize(256)
        palette.save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def photograph(chromium: str, page: Path, picture: Path) -> None:
    """Let headless Chromium draw a page into a PNG file."""
    width, height = SIZE
    subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--hide-scrollbars",
            f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri(),
        ],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
