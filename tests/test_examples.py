"""Examples do what they say."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from test_lazy import requests, write_tiny_run

from transformer_jax.decoding.lazy import LazyTranslator

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_ray_data_translates_a_file_line_by_line_in_its_order(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -e '.[ray]'")
    run = write_tiny_run(tmp_path / "run")
    lines = [line for several in requests() for line in several]
    (tmp_path / "input").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(EXAMPLES / "ray_data.py"), "--model", run, "--workers", "2", "--batch", "7"]
    command += ["--input", str(tmp_path / "input"), "--output", str(tmp_path / "output")]
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:  # a short path, since Ray makes sockets there
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": scratch, "PYTHONPATH": str(EXAMPLES.parent)}
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    translations = (tmp_path / "output").read_text().split("\n")[:-1]
    assert translations == LazyTranslator(run)(lines)
    assert len(set(translations)) > 3
