package containerd

import (
	"io"

	"github.com/containerd/containerd/v2/pkg/archive/compression"
)

// decompress returns the plain bytes of a stream that may be compressed with gzip or zstd.
func decompress(in io.Reader) (io.ReadCloser, error) { return compression.DecompressStream(in) }
