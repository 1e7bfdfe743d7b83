"""The parts of a run, built from its configuration. Only this package and its callers in `runs` and
`cli` know both the configuration and the packages of the parts.

    configuration   the settings of a YAML file, a mapping, or Python code
    compute         device and dtype
    models          the learner, and the frozen models and the critic beside it
    engines         the rollout engine, and what it will hold together: a row each in native and vllm
    environments    environments and their scoring workers
    prompts         which prompts leave room for a response
    orchestrator    settings of the orchestrator: sampling, groups, filters
    trainer         settings of the trainer: updates, optimizers, critic, guard, noise
    mirror          how a package's settings take the names of the configuration's keys
    about           the run in words
"""
