"""Traces, as a collector gets them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from anyaccel.server.jobs.job_traces import JobTraces
from anyaccel.server.jobs.store import JobStore

REQUEST = {"model": "embedded", "prompt": "a secret", "seeds": [7], "width": 128, "height": 128}


def test_a_collector_is_told_how_long_a_job_waited_and_ran(tmp_path: Path) -> None:
    heard: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            heard.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        spans = JobTraces(f"http://127.0.0.1:{collector.server_port}")
        jobs = JobStore(tmp_path)
        job, _ = jobs.submit(REQUEST)
        parent = spans.read_parent({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        spans.note_job(job.id, parent)
        jobs.take()
        spans.note_end(jobs.finish(job.id, [("0.png", b"x")], {}))
        spans.close()
        jobs.close()
        collector.shutdown()
    sent = [ExportTraceServiceRequest.FromString(one) for one in heard]
    found = {one.name: one for each in sent for one in each.resource_spans[0].scope_spans[0].spans}
    assert set(found) == {"job", "queue", "run"}
    assert found["job"].trace_id.hex() == "ab" * 16
    assert found["job"].parent_span_id.hex() == "cd" * 8
    assert found["queue"].parent_span_id == found["run"].parent_span_id == found["job"].span_id
    assert found["queue"].end_time_unix_nano == found["run"].start_time_unix_nano
    assert b"a secret" not in b"".join(heard)


def test_without_a_collector_nothing_is_sent(tmp_path: Path) -> None:
    spans, jobs = JobTraces(None), JobStore(tmp_path)
    job, _ = jobs.submit(REQUEST)
    spans.note_job(job.id)
    spans.note_end(job)
    spans.close()
    jobs.close()
    assert not spans.parents
