#!/usr/bin/env bash
# Submit a training run to a running Ray cluster and follow its log.
#
#   examples/submit_job.sh conf/llama3_8b.yaml run.dir=/shared/runs/llama3_8b [key=value ...]
#
# Run it where the dashboard can be reached (RAY_API_SERVER_ADDRESS, by default http://127.0.0.1:8265). Exit code 0: the
# job succeeded. `ray job stop ID` saves a checkpoint and stops; the same submission then resumes from it.
#
# run.dir, data.path: absolute, on a file system that every node sees. --working-dir uploads a copy of this
# directory without the files in .gitignore; Ray deletes it some time after the job.
#
# "Missing authentication token": export RAY_AUTH_MODE=token.
#
# The grace period of `ray job stop` is 3 s. Where a step and a save take longer, set RAY_JOB_STOP_WAIT_TIME_S, in
# seconds, in the environment of `ray start --head`.
set -euo pipefail
cd "$(dirname "$0")/.."

exec ray job submit --working-dir . -- raytrain-hpc train "$@"
