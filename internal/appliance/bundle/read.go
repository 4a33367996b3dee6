package bundle

import (
	"archive/tar"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Reader reads a bundle from its start to its end. It is not safe for concurrent use.
type Reader struct {
	tar      *tar.Reader
	manifest Manifest
	had      map[string]bool
	current  *verified // the file that Next returned last
}

// Open reads the manifest and verifies that one of keys signed it. Without a valid signature nothing else of the bundle is used, and the error is
// FailedPrecondition.
func Open(r io.Reader, keys []ed25519.PublicKey) (*Reader, error) {
	t := tar.NewReader(r)
	manifest, err := member(t, manifestName, maxManifest)
	if err != nil {
		return nil, err
	}
	signature, err := member(t, signatureName, ed25519.SignatureSize)
	if err != nil {
		return nil, err
	}
	m, err := Verify(manifest, signature, keys)
	if err != nil {
		return nil, err
	}
	return &Reader{tar: t, manifest: m, had: map[string]bool{}}, nil
}

// Verify reads the manifest of a bundle, and verifies that one of keys signed it. Errors: FailedPrecondition without a valid signature, InvalidArgument.
func Verify(manifest, signature []byte, keys []ed25519.PublicKey) (Manifest, error) {
	if !verify(manifest, signature, keys) {
		return Manifest{}, errdefs.Preconditionf("none of the %d keys that this machine trusts has signed the bundle", len(keys))
	}
	return parse(manifest)
}

// Content returns what r has of the file, which begins there. It ends as the content that Next returns.
func (f File) Content(r io.Reader) io.Reader { return &verified{in: r, file: f, whole: sha256.New()} }

// Manifest returns what the signer said.
func (r *Reader) Manifest() Manifest { return r.manifest }

// Next returns the next file that the manifest names, and its content. The content ends with io.EOF once all of it was verified, and with a DataLoss
// error at the first chunk that differs, of which it gives out nothing. Files of other names are skipped. After the last file, Next returns io.EOF if there was each file
// of the manifest. What the caller did not read of the file before is read and verified.
func (r *Reader) Next() (File, io.Reader, error) {
	if r.current != nil {
		if _, err := io.Copy(io.Discard, r.current); err != nil {
			return File{}, nil, err
		}
		r.current = nil
	}
	for {
		h, err := r.tar.Next()
		if errors.Is(err, io.EOF) {
			return File{}, nil, r.complete()
		}
		if err != nil {
			return File{}, nil, broken(err)
		}
		f, ok := r.manifest.Find(h.Name)
		if !ok {
			continue
		}
		if h.Typeflag != tar.TypeReg || h.Size != f.Size || r.had[f.Name] {
			return File{}, nil, errdefs.DataLossf("%s of the bundle is not the file of the manifest, or there twice", f.Name)
		}
		r.had[f.Name] = true
		r.current = &verified{in: r.tar, file: f, whole: sha256.New()}
		return f, r.current, nil
	}
}

func (r *Reader) complete() error {
	for _, f := range r.manifest.Files {
		if !r.had[f.Name] {
			return errdefs.DataLossf("the bundle ends before %s", f.Name)
		}
	}
	return io.EOF
}

// member reads the next member, which has that name and at most limit bytes.
func member(t *tar.Reader, name string, limit int64) ([]byte, error) {
	h, err := t.Next()
	if err != nil {
		return nil, broken(err)
	}
	if h.Name != name || h.Typeflag != tar.TypeReg || h.Size > limit {
		return nil, errdefs.Invalidf("this is no bundle of Cocoon OS: it has %.64q where %s belongs", h.Name, name)
	}
	b, err := io.ReadAll(t)
	if err != nil {
		return nil, broken(err)
	}
	return b, nil
}

// broken describes an error of the archive. That of the stream below it, such as a caller that went away, keeps its class.
func broken(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errdefs.Invalidf("this is no whole bundle of Cocoon OS: %w", err)
	}
	return fmt.Errorf("read the bundle: %w", err)
}

// verified gives out the content of a file, a chunk at a time once it has been verified.
type verified struct {
	in    io.Reader
	file  File
	whole hash.Hash
	next  int    // chunk
	buf   []byte // verified and not given out
	err   error
}

func (v *verified) Read(p []byte) (int, error) {
	for len(v.buf) == 0 {
		if v.err == nil {
			v.err = v.fill()
		}
		if v.err != nil {
			return 0, v.err
		}
	}
	n := copy(p, v.buf)
	v.buf = v.buf[n:]
	return n, nil
}

// fill reads and verifies a chunk.
func (v *verified) fill() error {
	if v.next == len(v.file.Chunks) {
		if got := hex.EncodeToString(v.whole.Sum(nil)); !strings.EqualFold(got, v.file.SHA256) {
			return errdefs.DataLossf("%s of the bundle differs from what was signed", v.file.Name)
		}
		return io.EOF
	}
	chunk := make([]byte, min(ChunkSize, v.file.Size-int64(v.next)*ChunkSize))
	if _, err := io.ReadFull(v.in, chunk); err != nil {
		return broken(err)
	}
	sum := sha256.Sum256(chunk)
	if !strings.EqualFold(hex.EncodeToString(sum[:]), v.file.Chunks[v.next]) {
		return errdefs.DataLossf("chunk %d of %s of the bundle differs from what was signed", v.next, v.file.Name)
	}
	v.whole.Write(chunk)
	v.next++
	v.buf = chunk
	return nil
}
