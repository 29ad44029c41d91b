"""Resolve `demo:` names and relative paths to absolute paths before the services see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace import demo
from headrace.config.run import RunConfig
from headrace.data.sources import is_source
from headrace.local import reward_probe
from headrace.service.module_command import module_command

DEMO_CACHE = Path(".cache/demo")


def demo_names(config: RunConfig) -> list[str]:
    """The `demo:` names in the configuration."""
    models = [m for m in (config.model.path, config.ref.path, config.critic.path) if m is not None]
    named = [*models, *config.data.train_paths, *config.data.val_files]
    return [name for name in named if demo.is_demo_uri(name)]


def demo_task(config: RunConfig) -> demo.Task | None:
    """The demo that the configuration uses; None if it uses none, or names that preflight refuses."""
    names = demo_names(config)
    if not set(names) <= set(demo.KNOWN_URIS):
        return None
    tasks = {task.name: task for task in map(demo.task_of, names)}
    return next(iter(tasks.values())) if len(tasks) == 1 else None


def demo_ready(config: RunConfig) -> bool:
    """Whether the demo's files, if any, are already built."""
    if not demo_names(config):
        return True
    task = demo_task(config)
    return task is not None and demo.is_cached(DEMO_CACHE, config.seed, task=task)


def demo_command(config: RunConfig) -> list[str]:
    """The command that prepares the demo. It is a separate process because it imports torch."""
    task = demo_task(config)
    assert task is not None, "preflight has refused a configuration that names no demo or several"
    options = ["--task", task.name, "--seed", str(config.seed), "--cache-dir", str(DEMO_CACHE)]
    return module_command("headrace.demo", *options)


def absolute(config: RunConfig) -> RunConfig:
    """Make relative paths absolute but keep `demo:` names. Later starts are compared with the result."""

    def path(value: str) -> str:
        return value if _is_name(value) else str(Path(value).expanduser().absolute())

    return _with_paths(config, path)


def resolve(config: RunConfig) -> RunConfig:
    """Make every path absolute. The demo's files must exist already (see `demo_ready`)."""

    def path(value: str) -> str:
        if demo.is_demo_uri(value):
            return str(demo.resolve(value, DEMO_CACHE, config.seed))
        return value if _is_name(value) else str(Path(value).expanduser().absolute())

    return _with_paths(config, path)


def _is_name(value: str) -> bool:
    """Whether the value names something other than a file."""
    is_address = "://" in value  # kept for the reader's error message: as a Path it would lose a slash
    return demo.is_demo_uri(value) or is_source(value) or is_address


def _with_paths(config: RunConfig, path: Callable[[str], str]) -> RunConfig:
    custom = config.custom_reward_function
    custom = custom.model_copy(update={"path": _function(custom.path)})
    sources = {
        name: source.model_copy(update={"path": _function(source.path)})
        for name, source in config.reward.sources.items()
    }
    template = config.data.chat_template
    data = config.data.model_copy(
        update={
            "train_files": [
                path(f) if isinstance(f, str) else f.model_copy(update={"path": path(f.path)})
                for f in config.data.train_files
            ],
            "val_files": [path(f) for f in config.data.val_files],
            "chat_template": template if template is None else str(Path(template).expanduser().absolute()),
        }
    )
    ref, critic = config.ref, config.critic
    if ref.path is not None:
        ref = ref.model_copy(update={"path": path(ref.path)})
    if critic.path is not None:
        critic = critic.model_copy(update={"path": path(critic.path)})
    environment = config.environment
    if environment.path is not None:
        environment = environment.model_copy(update={"path": _function(environment.path)})
    trainer = config.trainer
    if trainer.resume not in ("auto", "never"):
        trainer = trainer.model_copy(update={"resume": str(Path(trainer.resume).expanduser().absolute())})
    return config.model_copy(
        update={
            "trainer": trainer,
            "ref": ref,
            "critic": critic,
            "model": config.model.model_copy(update={"path": path(config.model.path)}),
            "data": data,
            "custom_reward_function": custom,
            "reward": config.reward.model_copy(update={"sources": sources}),
            "environment": environment,
            "algorithm": config.algorithm.model_copy(
                update={"modules": [str(_function(module)) for module in config.algorithm.modules]}
            ),
            "runs_dir": str(Path(config.runs_dir).expanduser().absolute()),
        }
    )


def _function(path: str | None) -> str | None:
    """Location of a user's code: make file paths absolute, keep module names."""
    return (
        str(Path(path).expanduser().absolute()) if path is not None and reward_probe.is_file(path) else path
    )
