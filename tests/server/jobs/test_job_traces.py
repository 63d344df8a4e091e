"""Traces of a job as an OTLP collector receives them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from anyaccel.server.jobs.job_traces import JobTraces
from anyaccel.server.jobs.store import JobStore

REQUEST = {"model": "embedded", "prompt": "a secret", "seeds": [7], "width": 128, "height": 128}


def test_a_collector_receives_the_queue_and_run_time_of_a_job(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = JobTraces(f"http://127.0.0.1:{collector.server_port}")
        jobs = JobStore(tmp_path)
        job, _ = jobs.submit(REQUEST)
        parent = traces.read_parent({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        traces.record_job(job.id, parent)
        jobs.take()
        traces.record_end(jobs.finish(job.id, [("0.png", b"x")], {}))
        traces.close()
        jobs.close()
        collector.shutdown()
    exports = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = {span.name: span for export in exports for span in export.resource_spans[0].scope_spans[0].spans}
    assert set(spans) == {"job", "queue", "run"}
    assert spans["job"].trace_id.hex() == "ab" * 16
    assert spans["job"].parent_span_id.hex() == "cd" * 8
    assert spans["queue"].parent_span_id == spans["run"].parent_span_id == spans["job"].span_id
    assert spans["queue"].end_time_unix_nano == spans["run"].start_time_unix_nano
    assert b"a secret" not in b"".join(bodies)


def test_without_a_collector_nothing_is_sent(tmp_path: Path) -> None:
    traces, jobs = JobTraces(None), JobStore(tmp_path)
    job, _ = jobs.submit(REQUEST)
    traces.record_job(job.id)
    traces.record_end(job)
    traces.close()
    jobs.close()
    assert not traces.parents
