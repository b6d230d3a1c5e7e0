"""The bucket of an S3 server in the tests, used and damaged through boto3."""

from __future__ import annotations

import boto3

BUCKET = "training"


class Bucket:
    """A bucket of a server, and the environment variables to reach it."""

    def __init__(self, url: str) -> None:
        """Create the bucket."""
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        self.client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        self.client.create_bucket(Bucket=BUCKET)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the names of all objects below a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        """Return the content of an object."""
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def write(self, key: str, content: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def count_unfinished_uploads(self) -> int:
        """Return the number of multipart uploads that were neither completed nor aborted."""
        return len(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))

    def clear(self) -> None:
        """Delete all objects and unfinished uploads."""
        for key in self.list_keys():
            self.delete(key)
        for upload in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
            self.client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
