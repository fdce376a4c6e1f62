#!/usr/bin/env bash
# One process on each host of a Cloud TPU slice, started from a machine that has gcloud, in a checkout:
#
#     export TPU_NAME=mine ZONE=europe-west4-b TYPE=v5litepod-32 VERSION=v2-alpha-tpuv5-lite SHARE=10.0.0.2:/share
#     examples/launch/tpu_pod.sh create     # the slice
#     examples/launch/tpu_pod.sh install    # this checkout and its environment on every host, and the share
#     examples/launch/tpu_pod.sh train.py --config=configs/phrases.py --workdir=/mnt/share/phrases
#     examples/launch/tpu_pod.sh decode.py --model=/mnt/share/phrases --input=/mnt/share/news.en \
#         --output=/mnt/share/news.de --shard=auto
#     examples/launch/tpu_pod.sh delete
#
# SHARE is an NFS export that all hosts can mount (Filestore): run directories and files to translate lie there.
set -euo pipefail

: "${TPU_NAME:?}" "${ZONE:?}"
tpu() { gcloud compute tpus tpu-vm "$1" "$TPU_NAME" --zone="$ZONE" "${@:2}"; }
on_all_hosts() { tpu ssh --worker=all --command="set -eu; $1"; }

# Which host this is, and how many there are, as JAX asks the slice too; decode.py reads them.
# shellcheck disable=SC2016  # the hosts expand it
numbers='
about() { curl -sf -H Metadata-Flavor:Google http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1; }
JAX_PROCESS_ID=$(about agent-worker-number); export JAX_PROCESS_ID
JAX_NUM_PROCESSES=$(about worker-network-endpoints | tr , "\n" | grep -c .); export JAX_NUM_PROCESSES'

# Processes that translate do not wait for each other: each takes the chips of its host for a slice of their own.
alone='export TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_VISIBLE_CHIPS=0,1,2,3'

case ${1:-} in
    create) tpu create --accelerator-type="${TYPE:?}" --version="${VERSION:?}" ;;
    delete) tpu delete ;;
    install)
        git archive --output=/tmp/transformer_jax.tar HEAD
        gcloud compute tpus tpu-vm scp /tmp/transformer_jax.tar "$TPU_NAME": --zone="$ZONE" --worker=all
        on_all_hosts "
            mkdir -p transformer_jax && tar -xf transformer_jax.tar -C transformer_jax
            python3 -m pip install --quiet --user uv && export PATH=\$HOME/.local/bin:\$PATH
            uv venv --quiet --allow-existing --python=3.13 venv
            uv pip install --quiet --python=venv -e ./transformer_jax 'jax[tpu]'
            sudo apt-get install -y -qq nfs-common > /dev/null && sudo mkdir -p /mnt/share
            mountpoint -q /mnt/share || sudo mount '${SHARE:?}' /mnt/share"
        ;;
    train.py) on_all_hosts "cd transformer_jax && ../venv/bin/python $(printf '%q ' "$@")" ;;
    decode.py) on_all_hosts "$numbers; $alone; cd transformer_jax && ../venv/bin/python $(printf '%q ' "$@")" ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 2 ;;
esac
