"""Traces, where a collector is named: one of each job, with how long it waited and how long it ran."""

from __future__ import annotations

import threading
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.server.jobs.store import Job

__all__ = ["JobTraces"]

_NANO = 1_000_000_000
_MOST = 10_000


class JobTraces:
    """Sends spans to a collector by OTLP over HTTP; does nothing without one."""

    def __init__(self, endpoint: str | None) -> None:
        self.tracer: Any = None
        self.lock = threading.Lock()
        self.parents: dict[str, Any] = {}
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UsageError(
                "traces need OpenTelemetry, which is not installed", hint="pip install 'anyaccel[serve]'"
            ) from error
        address = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        self.provider = TracerProvider(resource=Resource.create({"service.name": "anyaccel"}))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=5)))
        self.tracer = self.provider.get_tracer("anyaccel")

    def read_parent(self, headers: dict[str, str]) -> Any:
        """The span that a request says it belongs to."""
        if self.tracer is None:
            return None
        from opentelemetry.propagate import extract

        return extract(headers)

    def note_job(self, job: str, parent: Any = None) -> None:
        """A job was accepted."""
        if self.tracer is not None:
            with self.lock:
                if len(self.parents) < _MOST:
                    self.parents[job] = parent

    def note_end(self, job: Job) -> None:
        """A job ended: its span, with one for waiting and one for running."""
        if self.tracer is None:
            return
        from opentelemetry.trace import set_span_in_context

        with self.lock:
            parent = self.parents.pop(job.id, None)
        end = job.ended or job.created
        told = {
            "anyaccel.job": job.id,
            "anyaccel.state": job.state,
            "anyaccel.model": job.request["model"],
            "anyaccel.generation": len(job.request["seeds"]),
            "anyaccel.size": f"{job.request['width']}x{job.request['height']}",
            "anyaccel.attempts": job.attempts,
        }
        whole = self.tracer.start_span("job", context=parent, start_time=int(job.created * _NANO), attributes=told)
        inside = set_span_in_context(whole)
        parts = [("queue", job.created, job.started or end)]
        parts += [("run", job.started, end)] if job.started else []
        for name, begin, finish in parts:
            part = self.tracer.start_span(name, context=inside, start_time=int(begin * _NANO))
            part.end(int(finish * _NANO))
        whole.end(int(end * _NANO))

    def close(self) -> None:
        """Send what waits."""
        if self.tracer is not None:
            self.provider.shutdown()
