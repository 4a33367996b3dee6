package bundle

import (
	"archive/tar"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Source is the content of a file of a bundle to be. It is read twice.
type Source struct {
	Name    string
	Content io.ReadSeeker
}

// Write writes a bundle of the version that m describes with the content of sources, signed with key. The same input gives the same bytes. Files of m are ignored.
func Write(w io.Writer, m Manifest, sources []Source, key ed25519.PrivateKey) error {
	m.Format, m.Files = format, nil
	for _, s := range sources {
		f, err := describe(s)
		if err != nil {
			return fmt.Errorf("read %s: %w", s.Name, err)
		}
		m.Files = append(m.Files, f)
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write the manifest: %w", err)
	}
	if _, err := parse(manifest); err != nil {
		return err
	}
	if len(manifest) > maxManifest {
		return errdefs.Invalidf("the files are too large for a bundle")
	}
	t := tar.NewWriter(w)
	if err := put(t, manifestName, manifest); err != nil {
		return err
	}
	if err := put(t, signatureName, ed25519.Sign(key, signed(manifest))); err != nil {
		return err
	}
	for i, s := range sources {
		if _, err := s.Content.Seek(0, io.SeekStart); err != nil {
			return fmt.Errorf("read %s: %w", s.Name, err)
		}
		if err := t.WriteHeader(&tar.Header{Name: s.Name, Typeflag: tar.TypeReg, Mode: 0o644, Size: m.Files[i].Size}); err != nil {
			return fmt.Errorf("write %s: %w", s.Name, err)
		}
		if _, err := io.CopyN(t, s.Content, m.Files[i].Size); err != nil {
			return fmt.Errorf("copy %s: %w", s.Name, err)
		}
	}
	if err := t.Close(); err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	return nil
}

func put(t *tar.Writer, name string, b []byte) error {
	err := t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(b))})
	if err == nil {
		_, err = t.Write(b)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// describe reads a source once.
func describe(s Source) (File, error) {
	f := File{Name: s.Name, Chunks: []string{}}
	whole := sha256.New()
	buf := make([]byte, ChunkSize)
	for {
		n, err := io.ReadFull(s.Content, buf)
		if n > 0 {
			sum := sha256.Sum256(buf[:n])
			f.Chunks = append(f.Chunks, hex.EncodeToString(sum[:]))
			f.Size += int64(n)
			whole.Write(buf[:n])
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			f.SHA256 = hex.EncodeToString(whole.Sum(nil))
			return f, nil
		}
		if err != nil {
			return f, err
		}
	}
}
