#!/bin/bash
# One role of a run, as a task of a job step of run.sbatch:
#
#     role.sh engine|orchestrator|rank run.yaml [setting=value ...]
#
# An engine or an orchestrator that fails is started again here, on its node and with its port. A rank
# ends with its group, which run.sbatch starts again.
set -uo pipefail

role=$1
shift
case $role in
engine)
    export LOWROLL_ENGINE_ROLE=engine-$SLURM_PROCID
    command=(lowroll serve "$@" "serve.host=$SLURMD_NODENAME" "serve.port=$((PORT + SLURM_LOCALID))")
    ;;
orchestrator)
    command=(lowroll orchestrate "$@")
    ;;
rank)
    if ((SLURM_NTASKS > 1)); then
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
        export MASTER_ADDR=$HEAD MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    fi
    exec lowroll train "$@"
    ;;
*)
    echo "role.sh: $role is no role: engine, orchestrator or rank" >&2
    exit 2
    ;;
esac

child=
asked=
trap 'asked=yes; kill -TERM "$child" 2>/dev/null' TERM
code=1
for tries in 1 2 3 4 5 6; do
    "${command[@]}" &
    child=$!
    [[ -n $asked ]] && kill -TERM "$child"         # asked before it had a number
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do         # a trap cuts wait short
        wait "$child"
        code=$?
    done
    if [[ -n $asked ]] || ((code == 0 || code == 2)); then
        break                                      # 2: the settings are wrong, and stay so
    fi
    echo "role.sh: $role ended with $code, start $tries of 6" >&2
    sleep 2
done
exit "$code"
