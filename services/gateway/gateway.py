"""The gateway's parts, put together: text, workers, queue, handoffs, metrics. One a process, on its event loop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import Metric

from services.gateway.admission import Admission
from services.gateway.attempt import AttemptSettings
from services.gateway.cluster import PolledCluster, StaticCluster
from services.gateway.config import GatewayConfig
from services.gateway.errors import Unavailable
from services.gateway.handoff import Handoffs
from services.gateway.metrics import GatewayMetrics, gauge, labelled_gauge
from services.gateway.router import longest_request
from services.gateway.tenants.keys import KeyFileError, KeyRing
from services.gateway.text.model_text import ModelText
from services.gateway.timeline import Timelines
from services.gateway.tools.formats import OutputFormat
from services.gateway.work_pool import WorkPool
from services.gateway.worker_client import WorkerClient

logger = logging.getLogger(__name__)
VERSION = version("kvbaton")
KEYS_POLL_S = 1.0


class Gateway:
    """Create inside the running loop, then `start`."""

    def __init__(self, config: GatewayConfig, text: ModelText) -> None:
        self.config = config
        self.text = text
        source = text.template.source if text.template is not None else ""
        self.output_format = OutputFormat.of(source, config.tool_parser, config.reasoning_parser)
        self.leaving = False
        """Not ready, and still taking requests: who routes to this process has to notice first."""
        self.draining = False
        self.created = int(time.time())
        self.num_running = 0
        """Requests between their arrival and their last byte."""
        self.keys = KeyRing(config.api_keys_file) if config.api_keys_file else None
        self._watch: asyncio.Task[None] | None = None
        self.pool = WorkPool(config.threads, config.max_pending_text_jobs)
        self.metrics = GatewayMetrics(self._gauges)
        self.timelines = Timelines(config.max_timelines)
        self.admission = Admission(config.max_queued_requests, config.busy_retry_s)
        self._client = WorkerClient(
            config.secret_value,
            keepalive_s=config.keepalive_s,
            connect_timeout_s=config.connect_timeout_s,
            info_timeout_s=config.poll_timeout_s,
            max_connections=config.max_connections,
        )
        self.cluster = _cluster(config, self._client)
        self.handoffs = Handoffs(
            self._client,
            self.cluster,
            self.admission,
            self.metrics,
            AttemptSettings(config.secret_value, config.lease_s, config.local_prefill_max_tokens, config.migrate),
            max_attempts=config.max_attempts,
            recovery_wait_s=config.recovery_wait_s,
        )

    @classmethod
    async def create(cls, config: GatewayConfig) -> Gateway:
        """Load the text side on a thread, then build.
        Raises ConfigError, TokenizerError, TemplateError, DiscoveryError."""
        use_defaults = config.generation_config == "auto"
        text = await asyncio.to_thread(ModelText.load, config.model, config.chat_template, use_defaults=use_defaults)
        return cls(config, text)

    def start(self) -> None:
        self.cluster.start()
        if self.keys is not None:
            self._watch = asyncio.create_task(self._watch_keys(self.keys))

    async def _watch_keys(self, keys: KeyRing) -> None:
        while True:
            await asyncio.sleep(KEYS_POLL_S)
            try:
                if keys.reload_if_changed():
                    logger.info("API keys read again from %s", keys.path)
            except KeyFileError as error:
                logger.error("the API keys stay as they were: %s", error)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self.cluster.close()
        await self._client.close()
        self.pool.close()

    def leave(self) -> None:
        self.leaving = True

    def drain(self) -> None:
        self.draining = True

    def is_idle(self) -> bool:
        return self.num_running == 0

    @property
    def ready(self) -> bool:
        return not self.leaving and not self.draining and self._longest() > 0

    def context_tokens(self) -> int:
        """Longest prompt + output there is room for now. Raises Unavailable when no worker could take any."""
        longest = self._longest()
        if longest == 0:
            raise Unavailable("no worker that can serve is ready")
        return min(self.text.config.max_position_embeddings, longest)

    def described_context_tokens(self) -> int:
        """As context_tokens; the model's own context while no worker is there."""
        return min(
            self.text.config.max_position_embeddings, self._longest() or self.text.config.max_position_embeddings
        )

    def new_request_id(self) -> str:
        """Of a request that generates nothing."""
        return f"req-{uuid.uuid4().hex}"

    def system_fingerprint(self) -> str | None:
        """What answers are computed with: equal for equal models, dtypes and versions. None without a worker."""
        prints = {worker.info.fingerprint for worker in self.cluster.workers() if worker.info.fingerprint}
        if not prints:
            return None
        parts = sorted(f"{found.model} {found.dtype}" for found in prints)
        return "fp_" + hashlib.sha256("\n".join([VERSION, *parts]).encode()).hexdigest()[:12]

    def _longest(self) -> int:
        return longest_request(self.cluster.workers())

    def _gauges(self) -> Iterable[Metric]:
        yield gauge("running_requests", "Requests between arrival and last byte", self.num_running)
        yield gauge("queued_requests", "Requests that wait for a worker with room", self.admission.num_queued)
        yield gauge("pending_text_jobs", "Prompts waiting for a thread or on one", self.pool.num_pending)
        usable: dict[tuple[str, ...], int] = {("prefill",): 0, ("decode",): 0, ("both",): 0}
        for worker in self.cluster.workers():
            usable[worker.info.role,] += 1
        yield labelled_gauge("usable_workers", "Workers that can be given work", ["role"], usable)


def _cluster(config: GatewayConfig, client: WorkerClient) -> PolledCluster:
    if config.worker_selector is None:
        return StaticCluster(config.workers, client, poll_s=config.poll_s, lost_after_s=config.lost_after_s)
    from services.gateway.pod_cluster import PodCluster  # brings the Kubernetes client along

    assert config.worker_namespace is not None, "validated"
    return PodCluster(
        config.worker_namespace,
        config.worker_selector,
        config.api_credentials,
        client,
        poll_s=config.poll_s,
        lost_after_s=config.lost_after_s,
    )
