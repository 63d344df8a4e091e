"""The figures of the service, as Prometheus reads them; no label tells of a prompt, a key or a job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from anyaccel.server.jobs.store import Job, JobStore
from anyaccel.server.worker.messages import Heartbeat

__all__ = ["Metrics"]

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALLS = (1, 2, 4, 8, 16, 32)


class Metrics:
    """One service's figures."""

    def __init__(self, jobs: JobStore) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Queue(jobs))
        own = self.registry
        self.requests = Counter("anyaccel_http_requests", "Requests answered", ["path", "status"], registry=own)
        self.request_seconds = Histogram(
            "anyaccel_http_request_seconds", "From a request to its answer", ["path"], buckets=_SECONDS, registry=own
        )
        self.jobs_ended = Counter("anyaccel_jobs_ended", "Jobs that ended", ["state", "code"], registry=own)
        self.job_seconds = Histogram(
            "anyaccel_job_seconds", "From accepting a job to its end", buckets=_SECONDS, registry=own
        )
        self.queue_seconds = Histogram("anyaccel_queue_seconds", "How long jobs waited", buckets=_SECONDS, registry=own)
        self.images = Counter("anyaccel_images", "Pictures made", registry=own)
        self.step_seconds = Histogram(
            "anyaccel_step_seconds", "One step of one picture", buckets=_STEP_SECONDS, registry=own
        )
        self.round_calls = Histogram("anyaccel_round_calls", "Calls that ran as one step", buckets=_CALLS, registry=own)
        self.worker_ends = Counter("anyaccel_worker_ends", "Workers that were replaced", ["reason"], registry=own)
        self.device_bytes = Gauge("anyaccel_device_memory_bytes", "Memory in use on the device", registry=own)
        self.worker_bytes = Gauge("anyaccel_worker_memory_bytes", "Memory of the worker on the host", registry=own)
        self.models_loaded = Gauge("anyaccel_models_loaded", "Models in memory", registry=own)

    def note_beat(self, beat: Heartbeat) -> None:
        """What the worker holds, and the rounds that it ran."""
        if beat.device_bytes is not None:
            self.device_bytes.set(beat.device_bytes)
        self.worker_bytes.set(beat.host_bytes)
        self.models_loaded.set(len(beat.loaded))
        for calls, rounds in beat.rounds.items():
            for _ in range(rounds):
                self.round_calls.observe(calls)

    def note_end(self, job: Job) -> None:
        """A job ended."""
        self.jobs_ended.labels(job.state, (job.error or {}).get("code", "")).inc()
        if job.ended is not None:
            self.job_seconds.observe(max(0.0, job.ended - job.created))
        if job.started is not None:
            self.queue_seconds.observe(max(0.0, job.started - job.created))

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)


class _Queue(Collector):
    """How many jobs wait and run, counted when it is asked."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs

    def collect(self) -> list[GaugeMetricFamily]:
        """The two figures."""
        return [
            GaugeMetricFamily("anyaccel_jobs_queued", "Jobs that wait", value=self.jobs.count("queued")),
            GaugeMetricFamily("anyaccel_jobs_running", "Jobs that run", value=self.jobs.count("running")),
        ]
