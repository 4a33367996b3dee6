package cocoonmanager

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/compress"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/vm"
)

// journalName is the ConfigMap that names what was uploaded, in the namespace of the manager.
const journalName = "cocoon-uploads"

// uploadKey derives the key of the tokens of uploads from the certificate that all managers have. So it is kept nowhere, and changes with that.
func uploadKey(of certificate) func() ([]byte, error) {
	return func() ([]byte, error) {
		c, err := of(&tls.ClientHelloInfo{})
		if err != nil {
			return nil, err
		}
		secret, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
		if err != nil {
			return nil, fmt.Errorf("derive a key from that of the certificate: %w", err)
		}
		return hkdf.Key(sha256.New, secret, nil, "cocoon upload tokens", sha256.Size)
	}
}

// Put implements upload.Registry. The disk is checked as it passes: it has one manifest with one blob, as it came.
func (r registry) Put(ctx context.Context, repo string, body io.Reader, size int64, before func(digest string) error) (digest string, err error) {
	ref, err := ociclient.ParseRef(r.base + "/" + repo)
	if err != nil {
		return "", err
	}
	s, err := ociclient.Open(ctx, ref, ociclient.Auth{Token: r.auth.Token, CA: r.auth.CA}, ociclient.Push, ociclient.Config{})
	if err != nil {
		return "", err
	}
	defer s.Close()
	checked := checkDisk(body, size)
	blob, length, err := s.StreamBlob(ctx, checked)
	format, wrong := checked.verdict()
	if wrong != nil { // also when the bytes ended early because of it
		return "", wrong
	}
	if err != nil {
		return "", err
	}
	m, config := distribution.DiskManifest(format, blob, length)
	if err := s.PutBlob(ctx, m.Config.Digest, m.Config.Size, func() io.Reader { return bytes.NewReader(config) }); err != nil {
		return "", err
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode the manifest of an upload: %w", err)
	}
	digest = ociclient.Digest(raw)
	if err := before(digest); err != nil {
		return "", err
	}
	return s.PutManifest(ctx, uploadTag(digest), ociclient.MediaManifest, raw)
}

// uploadTag keeps the registry from taking a manifest for garbage. Each has its own, so two uploads at a time do not replace one another.
func uploadTag(digest string) string { return strings.Replace(digest, ":", "-", 1) }

// Remove implements upload.Registry.
func (r registry) Remove(ctx context.Context, repo, digest string) error {
	return r.remove(ctx, repo, uploadTag(digest))
}

// checkedDisk passes a disk on, and checks what it is meanwhile.
type checkedDisk struct {
	from  io.Reader // writes what is read of it to pipe, too
	pipe  *io.PipeWriter
	ended chan struct{}

	format vm.DiskFormat
	wrong  error
}

func checkDisk(r io.Reader, size int64) *checkedDisk {
	out, in := io.Pipe()
	c := &checkedDisk{from: io.TeeReader(r, in), pipe: in, ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		c.format, c.wrong = look(out, size)
		if c.wrong != nil {
			out.CloseWithError(c.wrong)
			return
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	return c
}

// Read implements io.Reader. It ends only when the whole disk is known to be one.
func (c *checkedDisk) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	if err == nil {
		return n, nil
	}
	if !errors.Is(err, io.EOF) {
		c.pipe.CloseWithError(err)
		return n, err
	}
	c.pipe.Close()
	<-c.ended
	if c.wrong != nil {
		return n, c.wrong
	}
	return n, io.EOF
}

// verdict ends the check, if the disk was not read to its end, and returns what it has found.
func (c *checkedDisk) verdict() (vm.DiskFormat, error) {
	c.pipe.CloseWithError(errInterrupted)
	<-c.ended
	if errors.Is(c.wrong, errInterrupted) {
		return "", nil
	}
	return c.format, c.wrong
}

var errInterrupted = errors.New("the upload has ended")

// look reads a disk to its end, also a compressed one, and checks that a volume of size bytes can have it.
// Errors: those of r, unchanged; InvalidArgument, DataLoss, Unsupported.
func look(r io.Reader, size int64) (vm.DiskFormat, error) {
	plain, _, err := compress.Reader(bufio.NewReader(r))
	if err != nil {
		return "", err
	}
	defer plain.Close()
	in := bufio.NewReaderSize(plain, disk.HeadSize)
	head, err := in.Peek(disk.HeadSize)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return "", err
	case len(head) == 0:
		return "", errdefs.Invalidf("the upload is empty")
	case oci.IsArchive(head):
		return "", errdefs.Invalidf("the upload is an archive, and only disks of machines can be uploaded; use --image-path with a raw or qcow2 disk")
	}
	head = bytes.Clone(head)
	format, err := disk.Recognise(head)
	if err != nil {
		return "", err
	}
	larger := func(virtual int64) error {
		return errdefs.Invalidf("the disk has %d bytes, more than the %d of the volume; make a larger claim", virtual, size)
	}
	if format == vm.DiskQCOW2 {
		q, err := qcow2.Parse(head)
		if err != nil {
			return "", err
		}
		if q.VirtualSize > size {
			return "", larger(q.VirtualSize)
		}
	}
	// What is decompressed is bounded, too: a few bytes can stand for very many.
	n, err := io.Copy(io.Discard, io.LimitReader(in, 2*size+1<<20))
	switch {
	case err != nil:
		return "", err
	case format == vm.DiskRaw && n > size, n > 2*size:
		return "", larger(n)
	case format == vm.DiskRaw:
		return format, disk.CheckRaw(head, n)
	}
	return format, nil
}
