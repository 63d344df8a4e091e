"""Job events: late subscribers get the current progress, and queued events are not lost at the end."""

import asyncio

from anyaccel.server.jobs.events import EventBus, JobEvent, Subscription


def collect(bus: EventBus, *later: JobEvent) -> list[JobEvent]:
    """Subscribe, publish the `later` events, and return everything that the subscriber receives."""

    async def subscribe() -> list[JobEvent]:
        with bus.subscribe("job") as subscription:
            for event in later:
                bus.publish("job", event)
            await asyncio.sleep(0)  # `publish` uses `call_soon_threadsafe`
            first = await subscription.next(1.0)
            assert first is not None
            return [first, *subscription.drain()]

    return asyncio.run(subscribe())


def test_a_late_subscriber_gets_every_preview() -> None:
    bus = EventBus()
    previews = [JobEvent("preview", index, number=number, content=b"x") for number in (0, 1) for index in (0, 1)]
    for event in (JobEvent("step", 0, 1, 4), *previews, JobEvent("step", 0, 2, 4), JobEvent("made", 1, content=b"y")):
        bus.publish("job", event)
    state = JobEvent("state")
    assert collect(bus, state) == [JobEvent("step", 0, 2, 4), *previews, JobEvent("made", 1, content=b"y"), state]
    assert bus.fraction("job", 2) == 0.25
    bus.forget("job")
    assert collect(bus, state) == [state], "the progress was dropped"
    assert not bus.subscriptions


def test_a_slow_reader_loses_steps_but_no_state_event() -> None:
    async def fill() -> list[JobEvent]:
        subscription = Subscription()
        subscription.put(JobEvent("state"))
        for number in range(500):
            subscription.put(JobEvent("step", 0, number, 500))
        return subscription.drain()

    events = asyncio.run(fill())
    assert events[0] == JobEvent("state")
    assert events[-1] == JobEvent("step", 0, 499, 500)
    assert len(events) == 64
