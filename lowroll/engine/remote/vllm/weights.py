"""How new weights reach a vLLM: as an adapter in a folder, with a name for each version; as a folder
of the whole model (`folders`); or from GPU to GPU by NCCL (`nccl`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowroll.engine.remote.http_client import ServerError
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.vllm.probe import TRANSFER, ProbedVllm
from lowroll.engine.remote.vllm.server import ServedModel, VllmServer

if TYPE_CHECKING:
    from lowroll.engine.remote.vllm.nccl import NcclTransfer
    from lowroll.weights.sync.base import Kind
    from lowroll.weights.sync.update import WeightUpdate

Way = Literal["folder", "nccl"]
PauseMode = Literal["keep", "wait", "abort"]


def update_kind(
    found: ProbedVllm, model: ServedModel, lora_rank: int | None, way: Way | None
) -> Kind | None:
    """Return the kind of updates that a vLLM takes, or None. ValueError for one that it cannot."""
    if lora_rank is not None:
        found.check_adapters()
        return "adapter"
    if way is None:
        return None
    if way == "nccl" and found.cpu:
        raise ValueError(f"way: nccl moves weights between GPUs, and {found.shown} is on a CPU")
    found.check_models(model.tied, *(TRANSFER if way == "nccl" else ()))
    return "full"


class VllmWeights:
    """The weights of one vLLM: sends updates, and removes what it no longer uses."""

    def __init__(
        self,
        pool: EnginePool,
        server: VllmServer,
        base: Path,
        exchange: Path | None,
        way: Way | None,
        request_s: float,
        is_local: bool,
    ) -> None:
        """base: the folder of its model. exchange: where folders of weights are written. way: of
        full updates. request_s: the limit of one call. is_local: vLLM is a child of this process."""
        self.pool = pool
        self.server = server
        self.base = base
        self.request_s = request_s
        self._transfer: NcclTransfer | None = None
        self._loaded: dict[str, Path] = {}
        self._versions: Counter[int] = Counter()
        if way == "nccl" and "full" in pool.capabilities.updates:
            from lowroll.engine.remote.vllm.nccl import NcclTransfer

            self._transfer = NcclTransfer(pool.begin, server.found, request_s, is_local)
        self._exchange = Path(tempfile.mkdtemp(prefix="lowroll-weights-", dir=exchange))

    def check(self, update: WeightUpdate) -> None:
        """Raise ValueError for an update that this vLLM cannot take."""
        accepted_kinds = self.pool.capabilities.updates
        if update.kind not in accepted_kinds:
            kinds = " or ".join(sorted(accepted_kinds)) or "none"
            raise ValueError(
                f"update: kind {update.kind!r}: this vLLM takes updates of kind {kinds}"
            )
        if update.noise is not None and update.noise.sigma != 0:
            raise ValueError("update: noise: vLLM puts none on its norms")
        if update.kind == "full" and update.input_scale != 1.0:
            raise ValueError(
                f"update: input_scale: the weights carry s = {update.input_scale}, which vLLM's "
                f"model does not"
            )

    def send(self, update: WeightUpdate) -> None:
        """Send a checked update and wait until vLLM has it."""
        if update.kind == "adapter":
            self.load_adapter(update)
        elif self._transfer is not None:
            self._transfer_all(self._transfer, update)
        else:
            self._reload(update)

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing: freeze the requests in flight, wait for their end, or abort them."""
        self.server.found.needs("pause", "/pause", "/resume")
        self.pool.run(self.server.pause(mode, self.request_s), self.request_s)

    def resume(self) -> None:
        self.pool.run(self.server.resume(self.request_s), self.request_s)

    def close(self, unload: bool) -> None:
        """Remove the folders; `unload`: and the adapters of a vLLM that continues."""
        if self._transfer is not None:
            self._transfer.close()
        if unload:
            with suppress(ServerError):
                self.unload(keep=None)
        shutil.rmtree(self._exchange, ignore_errors=True)

    def load_adapter(self, update: WeightUpdate) -> None:
        """Load an adapter under a name of its own, and unload those that are no longer used."""
        from lowroll.engine.remote.vllm.folders import write_adapter

        count = self._versions[update.version]
        name = f"pol-v{update.version}" + (f".{count}" if count else "")
        self._versions[update.version] += 1
        folder = write_adapter(update, self._exchange / name, self.base)
        self.pool.run(self.server.load_adapter(name, folder, self.request_s), self.request_s)
        self._loaded[name] = folder
        self.unload(keep=name)

    def unload(self, keep: str | None) -> None:
        """Unload the adapters that no request uses, but `keep`."""

        async def unload() -> None:
            kept_names = self.pool.models_in_use | {keep}
            for name in [name for name in self._loaded if name not in kept_names]:
                await self.server.unload_adapter(name, self.request_s)
                shutil.rmtree(self._loaded.pop(name), ignore_errors=True)

        self.pool.run(unload(), self.request_s * max(1, len(self._loaded)))

    def _reload(self, update: WeightUpdate) -> None:
        from lowroll.engine.remote.vllm.folders import write_model

        self._versions[update.version] += 1
        name = f"v{update.version}-{self._versions[update.version]}"
        folder = write_model(update, self._exchange / name, self.base, self.server.served.dtype)
        label = f"reloading the weights of version {name}"
        try:
            reload = self.server.reload(folder, label, self.request_s)
            self.pool.run(reload, 4 * self.request_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _transfer_all(self, transfer: NcclTransfer, update: WeightUpdate) -> None:
        tensors = transfer.check(update)
        self.pause("wait")
        transfer.send(tensors, self.server.served.dtype)
        self.pool.reset_prefix_cache()
        self.resume()
