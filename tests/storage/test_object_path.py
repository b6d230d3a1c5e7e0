"""Objects of a bucket: conditional writes, listings, ranges, multipart uploads, and how failures are reported."""

from __future__ import annotations

import errno

import pytest

from raytrain_hpc.storage.object_path import ObjectPath
from tests.storage.bucket import BUCKET
from tests.storage.s3_server import RandomFaults, make_denied_response, make_slow_down_response


def test_content_and_listing(folder, s3):
    (folder / "a" / "one").write_bytes(b"1")
    (folder / "a" / "two").write_bytes(b"22")
    (folder / "ab").write_bytes(b"other")
    names, infos = folder.list_directory()
    assert names == ["a"] and [(info.path.name, info.bytes) for info in infos] == [("ab", 5)]
    assert [info.path.name for info in (folder / "a").list_recursively()] == ["one", "two"]
    assert (folder / "a" / "two").get_size() == 2 and (folder / "ab").read_range(1, 3) == b"th"
    (folder / "a").delete_tree()
    (folder / "ab").delete()
    (folder / "ab").delete()
    assert s3.list_keys() == [] and not (folder / "ab").is_file()
    assert folder.list_directory() == ([], [])


def test_of_two_writers_with_the_same_condition_one_succeeds(folder):
    path = folder / "lease"
    first = path.create(b"1")
    with pytest.raises(FileExistsError):
        path.create(b"2")
    second = path.replace(b"3", first)
    with pytest.raises(FileExistsError):
        path.replace(b"4", first)
    assert path.read_with_version() == (b"3", second)
    path.delete()
    with pytest.raises(OSError):
        path.replace(b"5", second)


@pytest.mark.parametrize("size", [0, 1, 9 * 2**20 + 1])
def test_an_upload_has_the_content_of_its_chunks(folder, s3, size):
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    (folder / "x").upload((memoryview(content)[start : start + 3_000_000] for start in range(0, size, 3_000_000)), size)
    assert s3.read("runs/demo/x") == content


@pytest.mark.parametrize("operation", ["create", "part", "complete"])
def test_an_upload_survives_lost_answers(folder, s3, operation):
    matches = {
        "create": lambda request: request.query.rstrip("=") == "uploads",
        "part": lambda request: "partNumber=2" in request.query,
        "complete": lambda request: request.method == "POST" and "uploadId" in request.query,
    }[operation]
    seen = []

    def lose_first_answer(request, forward):
        answer = forward()
        if not matches(request) or seen:
            return answer
        seen.append(request)
        return make_slow_down_response()

    content = bytes(range(256)) * 2**16
    with s3.intercepting(lose_first_answer):
        (folder / "x").upload([content], len(content))
    assert seen and s3.read("runs/demo/x") == content


def test_an_upload_that_fails_leaves_nothing(folder, s3):
    def chunks():
        yield bytes(9 * 2**20)
        raise OSError(errno.EIO, "the source failed")

    with pytest.raises(OSError, match="the source failed"):
        (folder / "x").upload(chunks(), 10 * 2**20)
    assert s3.list_keys() == [] and s3.count_unfinished_uploads() == 0


def test_an_upload_that_is_refused_is_aborted(folder, s3):
    def refuse_second_part(request, forward):
        return make_denied_response("AccessDenied", 403) if "partNumber=2" in request.query else forward()

    with s3.intercepting(refuse_second_part), pytest.raises(OSError, match="AccessDenied"):
        (folder / "x").upload([bytes(20 * 2**20)], 20 * 2**20)
    assert s3.list_keys() == [] and s3.count_unfinished_uploads() == 0


def test_missing_objects_and_buckets_are_told_apart(folder):
    with pytest.raises(FileNotFoundError, match="no such object"):
        (folder / "x").read_bytes()
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        ObjectPath.from_url("s3://unknown/x").read_bytes()


@pytest.mark.parametrize(
    ("code", "status", "kind"), [("ExpiredToken", 400, OSError), ("AccessDenied", 403, PermissionError)]
)
def test_refused_credentials_are_named(folder, s3, code, status, kind):
    with s3.intercepting(lambda request, forward: make_denied_response(code, status)):
        with pytest.raises(kind) as error:
            (folder / "x").write_bytes(b"1")
        assert code in error.value.strerror and "\n" not in error.value.strerror
        with pytest.raises(kind):
            (folder / "x").read_bytes()
    assert len(s3.requests) <= 4  # not tried again


def test_requests_that_fail_are_tried_again(folder, s3):
    faults = RandomFaults(0.3, seed=1)
    with s3.intercepting(faults):
        for number in range(30):
            (folder / str(number)).write_bytes(b"x" * number)
            assert (folder / str(number)).read_bytes() == b"x" * number
    assert faults.count > 10


def test_a_store_that_always_throttles_is_an_error_after_a_bounded_time(folder, s3, monkeypatch):
    from datetime import timedelta

    from raytrain_hpc.storage import object_client

    monkeypatch.setitem(object_client._RETRY_CONFIG, "max_retries", 3)
    monkeypatch.setitem(object_client._RETRY_CONFIG, "retry_timeout", timedelta(seconds=2))
    object_client._open_bucket.cache_clear()
    throttle = s3.intercepting(lambda request, forward: make_slow_down_response())
    with throttle, pytest.raises(OSError, match="503 .*SlowDown") as error:
        (folder / "x").write_bytes(b"1")
    assert error.value.filename == f"s3://{BUCKET}/runs/demo/x" and len(s3.requests) == 4
    object_client._open_bucket.cache_clear()
