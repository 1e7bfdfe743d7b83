"""The results of a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lowroll.engine.base import PartialSample
from lowroll.engine.request import sampler_settings
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.kv.pages import PagePool, page_keys
from lowroll.types import BehaviorTag, PolicySpan, Rollout


def rollouts_of(group: LiveGroup, behavior: BehaviorTag, policy: PolicySpan) -> list[Rollout]:
    """Return the rollouts of an ended group. behavior, policy: for samples without tokens."""
    sampler = sampler_settings(group.request)
    rollouts = []
    for s in group.sequences:
        assert s.finish_reason is not None
        spans = tuple(s.spans) or (replace(policy, start=0),)
        tag = replace(
            s.behavior or behavior,
            policy=spans,
            sampler=sampler,
            seed=group.request.seed,
            request_id=group.request.id,
            sample=s.sample,
        )
        rollouts.append(
            Rollout(
                s.token_ids,
                s.logprobs,
                s.finish_reason,
                tag,
                s.stop_reason,
                s.evictions,
                s.top_logprobs,
            )
        )
    return rollouts


def drawn_by(samples: Iterable[Sequence] | Iterable[Rollout]) -> list[PartialSample]:
    return [
        PartialSample(s.token_ids, s.logprobs, s.finish_reason, s.top_logprobs, s.stop_reason)
        for s in samples
    ]


def behavior_salt(behavior: BehaviorTag) -> bytes:
    """Return a salt of everything that K/V depend on: only equal behaviors share prefix pages."""
    policy = behavior.policy[-1]
    return repr(
        (
            policy.version,
            policy.digest,
            behavior.weights,
            behavior.kv_policy,
            behavior.kv_budget,
            behavior.kv_dtype,
            behavior.noise_seed,
            behavior.noise_sigma,
        )
    ).encode()


def give_up(pool: PagePool, sequence: Sequence, salt: bytes) -> None:
    """Free the pages of a sample that ends. With turn caching, offer full pages to later turns,
    unless another sample may still write the prompt's last page, or a key is of other weights than
    `salt`."""
    group = sequence.group
    is_prompt_final = not group.num_unforked
    is_of_these_weights = group.page_keys is not None and group.salt == salt
    if pool.turn_caching and is_prompt_final and is_of_these_weights:
        all_ids = [*group.request.prompt_ids, *sequence.token_ids]
        keys = page_keys(all_ids[: sequence.cached_len], pool.page_size, salt)
        pool.publish(sequence.pages[: len(keys)], keys)
    pool.free(sequence.pages)
    sequence.pages = []
