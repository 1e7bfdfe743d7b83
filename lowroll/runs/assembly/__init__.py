"""The parts of a run, built from its configuration. Only this package and its callers in `runs` and
`cli` know both the configuration and the packages of the parts.

    configuration   the settings of a YAML file, a mapping, or Python code
    compute         device and dtype
    models          the learner, the frozen models and the critic
    engines         the rollout engine and its workloads: a row each in native and vllm
    environments    environments and their scoring workers
    prompts         which prompts leave space for a response
    orchestrator    settings of the orchestrator: sampling, groups, filters
    trainer         settings of the trainer: updates, optimizers, critic, guard, noise
    mirror          settings of a package by the names of configuration keys
    about           the run in words
"""
