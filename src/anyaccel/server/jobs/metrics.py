"""Prometheus metrics for the service.

Labels never contain prompts, API keys or job IDs.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from anyaccel.server.jobs.store import Job, JobStore
from anyaccel.server.worker.messages import Heartbeat

__all__ = ["Metrics"]

# Histogram buckets: seconds per request and job, seconds per step, calls per batch.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALLS = (1, 2, 4, 8, 16, 32)


class Metrics:
    """Prometheus metrics for one service."""

    def __init__(self, jobs: JobStore) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_QueueCollector(jobs))
        registry = self.registry
        self.requests = Counter(
            "anyaccel_http_requests", "HTTP requests answered", ["path", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "anyaccel_http_request_seconds",
            "Seconds from a request to the end of its response",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.jobs_ended = Counter("anyaccel_jobs_ended", "Jobs that ended", ["state", "code"], registry=registry)
        self.job_seconds = Histogram(
            "anyaccel_job_seconds", "Seconds from accepting a job to its end", buckets=_SECONDS, registry=registry
        )
        self.queue_seconds = Histogram(
            "anyaccel_queue_seconds", "Seconds that jobs waited in the queue", buckets=_SECONDS, registry=registry
        )
        self.images = Counter("anyaccel_images", "Images generated", registry=registry)
        self.step_seconds = Histogram(
            "anyaccel_step_seconds", "Seconds per step of one image", buckets=_STEP_SECONDS, registry=registry
        )
        self.round_calls = Histogram(
            "anyaccel_round_calls", "Calls per denoiser batch", buckets=_CALLS, registry=registry
        )
        self.worker_ends = Counter("anyaccel_worker_ends", "Workers that were replaced", ["reason"], registry=registry)
        self.device_bytes = Gauge("anyaccel_device_memory_bytes", "Device memory in use", registry=registry)
        self.worker_bytes = Gauge("anyaccel_worker_memory_bytes", "Host memory of the worker", registry=registry)
        self.models_loaded = Gauge("anyaccel_models_loaded", "Models in memory", registry=registry)

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record the memory use, batch sizes and number of loaded models from a worker's heartbeat."""
        if heartbeat.device_bytes is not None:
            self.device_bytes.set(heartbeat.device_bytes)
        self.worker_bytes.set(heartbeat.host_bytes)
        self.models_loaded.set(len(heartbeat.loaded))
        # prometheus_client's `observe` has no count argument.
        for calls, count in heartbeat.batches.items():
            for _ in range(count):
                self.round_calls.observe(calls)

    def record_end(self, job: Job) -> None:
        """Record the outcome and durations of a job that has ended."""
        self.jobs_ended.labels(job.state, (job.error or {}).get("code", "")).inc()
        # The clock may have been set back: a negative duration would corrupt the sum.
        if job.ended is not None:
            self.job_seconds.observe(max(0.0, job.ended - job.created))
        if job.started is not None:
            self.queue_seconds.observe(max(0.0, job.started - job.created))

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _QueueCollector(Collector):
    """Collector that reads the numbers of queued and running jobs from the store on each scrape."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs

    def collect(self) -> list[GaugeMetricFamily]:
        """Return gauges with the current numbers of queued and running jobs."""
        return [
            GaugeMetricFamily("anyaccel_jobs_queued", "Jobs in the queue", value=self.jobs.count("queued")),
            GaugeMetricFamily("anyaccel_jobs_running", "Jobs that are running", value=self.jobs.count("running")),
        ]
