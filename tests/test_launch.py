"""The files in examples/launch/ start commands that exist, on processes that find each other."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from test_lazy import requests, write_tiny_run

import decode
import train
from transformer_jax.config_check import check

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
MANIFEST = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))

pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")  # how ml_collections reads a config


def commands(text):
    """What stands behind each `train.py` or `decode.py` in a text, as words, with the name first."""
    joined = re.sub(r"\\\n#? *|\n +(?=--)", " ", text)
    return [shlex.split(found) for found in re.findall(r"\b(?:train|decode)\.py(?: +--[\w.]+=\S+)*", joined)]


def manifest(kind, name):
    (found,) = (one for one in MANIFEST if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found["spec"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_shell(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", [*SCRIPTS, LAUNCH / "kubernetes.yaml"], ids=lambda path: path.name)
def test_the_commands_have_flags_and_configurations_that_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    found = [words for words in commands(path.read_text()) if len(words) > 1]
    assert {words[0] for words in found} == {"train.py", "decode.py"}
    for name, *flags in found:
        if name == "train.py":
            sys.modules.pop("config_config", None)  # ml_collections reads every config file into this one module
            check(train.parse([name, *flags]).config)
        else:
            options = decode.parse(flags)
            assert options.shard is not None
            assert options.input != options.output


@pytest.mark.parametrize("name", ["train", "translate"])
def test_as_many_pods_are_started_as_are_told_of_each_other(name):
    job = manifest("Job", name)
    (container,) = job["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert job["completionMode"] == "Indexed"
    assert {job["completions"], job["parallelism"], int(environment["JAX_NUM_PROCESSES"])} == {job["completions"]}
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in job["template"]["spec"]["volumes"]}
    volumes = job["template"]["spec"]["volumes"]
    claims = [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]
    assert manifest("PersistentVolumeClaim", *claims)["accessModes"] == ["ReadWriteMany"]


def test_pods_meet_at_the_first_one_under_the_name_that_the_service_gives_it():
    job, service = manifest("Job", "train"), manifest("Service", "train")
    environment = {one["name"]: one.get("value") for one in job["template"]["spec"]["containers"][0]["env"]}
    assert re.fullmatch(r"train-0\.train:\d+", environment["JAX_COORDINATOR_ADDRESS"])
    assert job["template"]["spec"]["subdomain"] == "train"
    assert (service["clusterIP"], service["selector"]) == ("None", {"job-name": "train"})


SRUN = """#!{python}
import os, subprocess, sys
environment = os.environ | {{"SLURM_JOB_ID": "123", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}}
processes = [
    subprocess.Popen(sys.argv[1:], env=environment | {{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}})
    for number in range(2)
]
sys.exit(max(process.wait() for process in processes))
"""


@pytest.mark.slow
def test_slurm_shares_a_file_over_its_nodes(tmp_path):
    """With an `srun` that starts the processes here, with the variables that the real one sets."""
    run = write_tiny_run(tmp_path / "run")
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    lines = [line for several in requests() for line in several]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    flags = ["decode.py", f"--model={run}", f"--input={tmp_path}/in", "--chunk=5", "--format=json"]
    for output, more in (("whole", ()), ("shared", ("--shard=auto",))):
        command = [*flags, f"--output={tmp_path / output}", *more]
        first = ["bash", str(LAUNCH / "slurm.sh")] if more else [sys.executable]
        subprocess.run([*first, *command], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "whole").read_bytes()
    assert len((tmp_path / "whole").read_text().splitlines()) == len(lines)
    numbers = [json.loads(line)["line"] for line in (tmp_path / "shared").read_text().splitlines()]
    assert numbers == list(range(1, len(lines) + 1))
