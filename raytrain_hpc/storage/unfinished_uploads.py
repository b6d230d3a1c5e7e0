"""Removal of multipart uploads that a killed process has left: S3 bills their parts, but lists no object."""

from __future__ import annotations

import errno
import os
from importlib.util import find_spec

from raytrain_hpc.storage.object_path import ObjectPath


def can_abort_uploads(scheme: str) -> bool:
    """Return whether unfinished uploads to stores of a URL scheme can be aborted here, or end by themselves."""
    return scheme != "s3" or find_spec("boto3") is not None


def abort_unfinished_uploads(prefix: ObjectPath) -> int:
    """Abort all unfinished multipart uploads below a prefix of S3, and return their number.

    Call while no process uploads there. Does nothing without boto3, since obstore cannot list uploads; a lifecycle rule
    of the bucket (AbortIncompleteMultipartUpload) then removes them. Google Cloud Storage and Azure drop them after a
    week. Raises OSError.
    """
    if prefix.scheme != "s3" or not can_abort_uploads("s3"):
        return 0
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.client("s3", region_name=os.environ.get("AWS_REGION"))
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=prefix.bucket, Prefix=f"{prefix.key}/")
        uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            client.abort_multipart_upload(Bucket=prefix.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except (BotoCoreError, ClientError) as error:
        raise OSError(errno.EIO, f"unfinished uploads cannot be removed: {error}", str(prefix)) from error
    return len(uploads)
