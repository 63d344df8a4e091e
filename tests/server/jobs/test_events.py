"""News of jobs: whoever comes late hears what was there before, and what has come is not lost at the end."""

import asyncio

from anyaccel.server.jobs.events import EventBus, JobEvent, Subscription


def listen(bus: EventBus, *later: JobEvent) -> list[JobEvent]:
    """What one hears who comes now, and stays while more happens."""

    async def hear() -> list[JobEvent]:
        with bus.listening("job") as news:
            for one in later:
                bus.publish("job", one)
            await asyncio.sleep(0)  # what other threads publish comes by way of the loop
            first = await news.next(1.0)
            assert first is not None
            return [first, *news.rest()]

    return asyncio.run(hear())


def test_one_who_comes_late_hears_of_every_preview() -> None:
    bus = EventBus()
    previews = [JobEvent("preview", picture, number=number, content=b"x") for number in (0, 1) for picture in (0, 1)]
    for one in (JobEvent("step", 0, 1, 4), *previews, JobEvent("step", 0, 2, 4), JobEvent("made", 1, content=b"y")):
        bus.publish("job", one)
    state = JobEvent("state")
    assert listen(bus, state) == [JobEvent("step", 0, 2, 4), *previews, JobEvent("made", 1, content=b"y"), state]
    assert bus.share("job", 2) == 0.25
    bus.forget("job")
    assert listen(bus, state) == [state], "it begins anew"
    assert not bus.listeners


def test_a_slow_reader_loses_steps_and_no_state() -> None:
    async def fill() -> list[JobEvent]:
        news = Subscription()
        news.put(JobEvent("state"))
        for number in range(500):
            news.put(JobEvent("step", 0, number, 500))
        return news.rest()

    left = asyncio.run(fill())
    assert left[0] == JobEvent("state")
    assert left[-1] == JobEvent("step", 0, 499, 500)
    assert len(left) == 64
