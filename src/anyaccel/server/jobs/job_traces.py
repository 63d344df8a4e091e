"""OpenTelemetry traces: one span per job, with child spans for its queue time and run time."""

from __future__ import annotations

import threading
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.server.jobs.store import Job

__all__ = ["JobTraces"]

_NS_PER_S = 1_000_000_000
# Parent contexts in memory: bounded, because jobs may be queued faster than they end.
_MAX_PARENTS = 10_000


class JobTraces:
    """Exporter that sends trace spans for jobs to an OTLP/HTTP endpoint, if one is configured."""

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
                "--otlp requires OpenTelemetry, which is not installed",
                hint="install it with `pip install 'anyaccel[serve]'`",
            ) from error
        # The endpoint may be a base URL, as OTEL_EXPORTER_OTLP_ENDPOINT is, or the full URL of the traces.
        url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        self.provider = TracerProvider(resource=Resource.create({"service.name": "anyaccel"}))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=5)))
        self.tracer = self.provider.get_tracer("anyaccel")

    def read_parent(self, headers: dict[str, str]) -> Any:
        """Extract the trace context from a request's `traceparent` header.

        Returns None if no trace endpoint is configured.
        """
        if self.tracer is None:
            return None
        from opentelemetry.propagate import extract

        return extract(headers)

    def record_job(self, job: str, parent: Any = None) -> None:
        """Store the parent trace context of an accepted job until the job ends."""
        if self.tracer is not None:
            with self.lock:
                if len(self.parents) < _MAX_PARENTS:
                    self.parents[job] = parent

    def record_end(self, job: Job) -> None:
        """Create and export the trace spans for a job that has ended."""
        if self.tracer is None:
            return
        from opentelemetry.trace import set_span_in_context

        with self.lock:
            parent = self.parents.pop(job.id, None)
        end = job.ended or job.created
        # Never the prompt: traces leave the machine.
        attributes = {
            "anyaccel.job": job.id,
            "anyaccel.state": job.state,
            "anyaccel.model": job.request["model"],
            "anyaccel.images": len(job.request["seeds"]),
            "anyaccel.size": f"{job.request['width']}x{job.request['height']}",
            "anyaccel.attempts": job.attempts,
        }
        # The spans are created when the job ends, with their real times: a queued job can outlive the process.
        start_time = int(job.created * _NS_PER_S)
        job_span = self.tracer.start_span("job", context=parent, start_time=start_time, attributes=attributes)
        context = set_span_in_context(job_span)
        phases = [("queue", job.created, job.started or end)]
        phases += [("run", job.started, end)] if job.started else []
        for name, phase_start, phase_end in phases:
            span = self.tracer.start_span(name, context=context, start_time=int(phase_start * _NS_PER_S))
            span.end(int(phase_end * _NS_PER_S))
        job_span.end(int(end * _NS_PER_S))

    def close(self) -> None:
        """Export the remaining spans and stop the exporter."""
        if self.tracer is not None:
            self.provider.shutdown()
