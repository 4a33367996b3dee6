package chunked

import (
	"encoding/json"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// Plan is the decision of a pull before it fetches data, from the given metadata. It returns the number of bytes to
// write.
func Plan(manifest, config, record []byte) (int64, error) {
	var m ociclient.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return 0, errdefs.Invalidf("manifest: %w", err)
	}
	if err := checkManifest(m); err != nil {
		return 0, err
	}
	c, err := artifact.ParseConfig(config)
	if err != nil {
		return 0, err
	}
	if !slices.ContainsFunc(m.Layers, isRecord) {
		return 0, artifact.Foreign(c.Hypervisor)
	}
	s, err := parseRecord(record, c, []string{"qemu"})
	if err != nil {
		return 0, err
	}
	files, err := plan(s, c, m)
	n := int64(0)
	for _, f := range files {
		if f.data() < 0 || f.data() > f.size {
			panic("a file has more data than bytes")
		}
		n += f.data()
	}
	return n, err
}

// Cut returns the offsets and lengths of the chunks that the data is cut into.
func Cut(size int64, pages func(add func(offset int64, p []byte) error, hole func(n int64) error) error) ([]artifact.Extent, error) {
	var out []artifact.Extent
	s := sizingOf(size)
	c := chunker{
		s:   s,
		get: func() ([]byte, error) { return make([]byte, 0, s.max()), nil },
		emit: func(offset int64, b []byte) error {
			out = append(out, artifact.Extent{Offset: offset, Length: int64(len(b))})
			return nil
		},
	}
	if err := pages(c.add, c.hole); err != nil {
		return nil, err
	}
	return out, c.flush()
}

// PruneBases removes the oldest bases of a client.
func PruneBases(c *Client, most int, room int64) {
	c.index.mu.Lock()
	defer c.index.mu.Unlock()
	c.index.pruneBases(most, room)
}
