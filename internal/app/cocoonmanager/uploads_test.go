package cocoonmanager

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// rawDisk is a disk with the signature of a boot sector.
func rawDisk(size int) []byte {
	b := make([]byte, size)
	b[510], b[511] = 0x55, 0xaa
	return b
}

// qcow2Disk is the header of a disk without content. Its backing file, if it has one, is named at that offset.
func qcow2Disk(virtual, backing uint64) []byte {
	b := make([]byte, 4<<16)
	put := binary.BigEndian
	copy(b, "QFI\xfb")
	put.PutUint32(b[4:], 3)
	put.PutUint64(b[8:], backing)
	if backing != 0 {
		put.PutUint32(b[16:], 4)
	}
	put.PutUint32(b[20:], 16) // cluster bits
	put.PutUint64(b[24:], virtual)
	put.PutUint32(b[36:], 1)     // L1 entries
	put.PutUint64(b[40:], 3<<16) // L1 table
	put.PutUint64(b[48:], 1<<16) // refcount table
	put.PutUint32(b[56:], 1)
	put.PutUint32(b[96:], 4) // refcount order
	put.PutUint32(b[100:], 104)
	return b
}

func zipped(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(b)
	_ = w.Close()
	return out.Bytes()
}

const uploadsOfClaim = "uploads/team/uid"

func TestPut(t *testing.T) {
	const size = 1 << 20
	gone := errors.New("the client is gone")
	for name, c := range map[string]struct {
		body  io.Reader
		media string // of the disk that is stored
		fails func(error) bool
		says  string
	}{
		"a raw disk":        {bytes.NewReader(rawDisk(size)), "application/vnd.cocoonstack.disk.raw", nil, ""},
		"by small pieces":   {iotest.OneByteReader(bytes.NewReader(rawDisk(4096))), "application/vnd.cocoonstack.disk.raw", nil, ""},
		"a compressed one":  {bytes.NewReader(zipped(rawDisk(size))), "application/vnd.cocoonstack.disk.raw", nil, ""},
		"a qcow2 disk":      {bytes.NewReader(qcow2Disk(size, 0)), "application/vnd.cocoonstack.disk.qcow2", nil, ""},
		"nothing":           {strings.NewReader(""), "", errdefs.IsInvalid, "is empty"},
		"noise":             {strings.NewReader(strings.Repeat("noise ", 1000)), "", errdefs.IsInvalid, "unknown image format"},
		"larger":            {bytes.NewReader(rawDisk(size + 1)), "", errdefs.IsInvalid, "more than the 1048576"},
		"larger, zipped":    {bytes.NewReader(zipped(rawDisk(64 * size))), "", errdefs.IsInvalid, "more than the 1048576"},
		"larger as seen":    {bytes.NewReader(qcow2Disk(2*size, 0)), "", errdefs.IsInvalid, "2097152 bytes, more than"},
		"with another file": {bytes.NewReader(qcow2Disk(size, 512)), "", errdefs.IsInvalid, "backing file"},
		"half of a zip":     {bytes.NewReader(zipped(rawDisk(size))[:100]), "", func(err error) bool { return errdefs.Is(err, errdefs.DataLoss) }, ""},
		"a broken body":     {io.MultiReader(bytes.NewReader(rawDisk(4096)), iotest.ErrReader(gone)), "", func(err error) bool { return errors.Is(err, gone) }, ""},
	} {
		s := newCatalog(t)
		noted := ""
		digest, err := s.Put(t.Context(), uploadsOfClaim, c.body, size, func(digest string) error {
			noted = digest
			_, err := s.manifest(digest)
			if !errdefs.IsNotFound(err) {
				t.Errorf("%s: the registry had it before it was noted: %v", name, err)
			}
			return nil
		})
		if c.fails != nil {
			if err == nil || !c.fails(err) || !strings.Contains(err.Error(), c.says) || noted != "" {
				t.Errorf("%s: %v, noted %q", name, err, noted)
			}
			continue
		}
		if err != nil || digest != noted {
			t.Errorf("%s: %s, noted %s, %v", name, digest, noted, err)
			continue
		}
		m, err := s.manifest(digest)
		if err != nil || len(m.Layers) != 1 || m.Layers[0].MediaType != c.media {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		if err := errors.Join(s.Remove(t.Context(), uploadsOfClaim, digest), s.Remove(t.Context(), uploadsOfClaim, digest)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := s.manifest(uploadTag(digest)); !errdefs.IsNotFound(err) {
			t.Errorf("%s: it is still there: %v", name, err)
		}
	}
	s := newCatalog(t)
	refused := errors.New("it cannot be noted")
	digest := ""
	if _, err := s.Put(t.Context(), uploadsOfClaim, bytes.NewReader(rawDisk(size)), size, func(d string) error { digest = d; return refused }); !errors.Is(err, refused) {
		t.Error(err)
	}
	if _, err := s.manifest(digest); !errdefs.IsNotFound(err) {
		t.Errorf("what nobody noted is in the registry: %v", err)
	}
	s.down = true
	if _, err := s.Put(t.Context(), uploadsOfClaim, bytes.NewReader(rawDisk(size)), size, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a registry that refuses: %v", err)
	}
}

// manifest reads a manifest of the uploads.
func (s *catalog) manifest(id string) (m ociclient.Manifest, err error) {
	ref, err := ociclient.ParseRef(s.base + "/" + uploadsOfClaim)
	if err != nil {
		return m, err
	}
	session, err := ociclient.Open(s.t.Context(), ref, ociclient.Auth{}, ociclient.Pull, ociclient.Config{Attempts: 1})
	if err != nil {
		return m, err
	}
	defer session.Close()
	raw, _, err := session.Manifest(context.WithoutCancel(s.t.Context()), id)
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(raw, &m)
}

// All managers with one certificate have one key, and it is not that of another certificate.
func TestUploadKey(t *testing.T) {
	of := func() *tls.Certificate {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Certificate{PrivateKey: key}
	}
	derive := func(c *tls.Certificate) string {
		key, err := uploadKey(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c, nil })()
		if err != nil {
			t.Fatal(err)
		}
		return string(key)
	}
	a := of()
	if x, y := derive(a), derive(a); x != y || len(x) != 32 {
		t.Errorf("%x, %x", x, y)
	}
	if derive(a) == derive(of()) {
		t.Error("two certificates have the same key")
	}
	if _, err := uploadKey(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return nil, errdefs.Unavailablef("not yet") })(); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
}
