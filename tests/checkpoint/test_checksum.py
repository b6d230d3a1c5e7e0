"""Checksums of files: independent of how the content is divided, each block by itself, and fast."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import xxhash

from raytrain_hpc.checkpoint.checksum import ChecksumBuilder, FileChecksum

BLOCK = 4 * 2**20


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_the_checksum_is_that_of_the_content_however_it_is_divided(size):
    content = random.Random(size).randbytes(size)
    expected_blocks = [xxhash.xxh3_64_hexdigest(content[start : start + BLOCK]) for start in range(0, size, BLOCK)]
    for divide_seed in range(3):
        builder, position, draw = ChecksumBuilder(), 0, random.Random(divide_seed)
        while position < size:
            end = min(size, position + draw.randrange(1, 2 * BLOCK))
            builder.update(memoryview(content)[position:end])
            position = end
        checksum = builder.finish()
        assert (checksum.bytes, checksum.digest) == (size, xxhash.xxh3_128_hexdigest(content))
        assert checksum.block_digests == "".join(expected_blocks)
        for number in range(len(expected_blocks)):
            block = bytearray(content[number * BLOCK : (number + 1) * BLOCK])
            assert checksum.matches_block(number, memoryview(block))
            block[-1] ^= 1
            assert not checksum.matches_block(number, memoryview(block))


def test_golden_value():
    """Checkpoints hold these digests: another algorithm or block size would make them look damaged."""
    builder = ChecksumBuilder()
    builder.update(bytes(range(256)) * 20000)
    assert asdict(builder.finish()) == {
        "bytes": 5120000,
        "algorithm": "xxh3_128",
        "digest": "27397b3a4811bfedb1723ebbaae0bd01",
        "block_bytes": 4194304,
        "block_digests": "fc8ac74b334706be6ad72a107a3cee03",
    }


@pytest.mark.parametrize(
    "change",
    [{"algorithm": "crc32"}, {"block_digests": "00"}, {"block_bytes": 0}, {"block_bytes": 1}, {"bytes": "x"}],
)
def test_a_malformed_entry_is_refused(change):
    builder = ChecksumBuilder()
    builder.update(b"content")
    with pytest.raises(ValueError, match=r".+"):
        FileChecksum.from_json(asdict(builder.finish()) | change)
