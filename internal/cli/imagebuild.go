package cli

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

// imageBuild makes an OCI image layout of one layer. It is deterministic: the same files give the same bytes.
type imageBuild struct {
	entrypoint, cmd, workdir, user, arch string
	env                                  []string

	entrypointWords, cmdWords []string
}

func (b *imageBuild) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&b.entrypoint, "entrypoint", "", "program that a VM of the image runs, or a JSON list with its first arguments")
	fs.StringVar(&b.cmd, "cmd", "", "argument that can be replaced when a VM is made, or a JSON list of them")
	fs.StringArrayVarP(&b.env, "env", "e", nil, "environment variable NAME=VALUE; may be repeated")
	fs.StringVarP(&b.workdir, "workdir", "w", "", "working directory")
	fs.StringVarP(&b.user, "user", "u", "", "user: name, uid, user:group")
	fs.StringVar(&b.arch, "arch", runtime.GOARCH, "architecture of the programs: amd64 or arm64")
	textui.CompleteWords(cmd, "arch", "amd64", "arm64")
}

// check validates the flags before anything is read.
func (b *imageBuild) check() (err error) {
	if b.entrypointWords, err = words("entrypoint", b.entrypoint); err != nil {
		return err
	}
	if b.cmdWords, err = words("cmd", b.cmd); err != nil {
		return err
	}
	for _, e := range b.env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return errdefs.Invalidf("--env %q is not NAME=VALUE", e)
		}
	}
	switch {
	case b.workdir != "" && !strings.HasPrefix(b.workdir, "/"):
		return errdefs.Invalidf("--workdir %q is not an absolute path", b.workdir)
	case !slices.Contains([]string{"amd64", "arm64"}, b.arch):
		return errdefs.Invalidf("--arch %q is neither amd64 nor arm64", b.arch)
	}
	return nil
}

const mediaLayer = "application/vnd.oci.image.layer.v1.tar"

// spooledLayer is the layer as it is sent: its digest must be known before its first byte is sent.
type spooledLayer struct {
	f      *os.File
	temp   bool
	size   int64
	digest string // of the bytes in f
	diffID string // of the tar in it
	media  string
}

func (l *spooledLayer) close() {
	l.f.Close()
	if l.temp {
		_ = os.Remove(l.f.Name())
	}
}

// layer reads source: a folder, the file of a tar, or - for a tar on stdin.
func (b *imageBuild) layer(source string, stdin io.Reader) (*spooledLayer, error) {
	if source == "-" {
		return spool(func(w io.Writer) error { _, err := io.Copy(w, stdin); return err })
	}
	fi, err := os.Stat(source)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.New(errdefs.NotFound, "read the root file system: %w", err)
	case err != nil:
		return nil, errdefs.New(errdefs.FailedPrecondition, "read the root file system: %w", err)
	case fi.IsDir():
		return spool(func(w io.Writer) error { return tarFolder(w, source) })
	}
	f, err := os.Open(source)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "read the root file system: %w", err)
	}
	if !fi.Mode().IsRegular() {
		defer f.Close()
		return spool(func(w io.Writer) error { _, err := io.Copy(w, f); return err })
	}
	l := &spooledLayer{f: f}
	if err := l.measure(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func spool(fill func(io.Writer) error) (*spooledLayer, error) {
	f, err := os.CreateTemp("", "cocoon-build-*")
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "make a temporary file: %w", err)
	}
	l := &spooledLayer{f: f, temp: true}
	w := bufio.NewWriterSize(f, 1<<20)
	err = fill(w)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = l.measure()
	}
	if err != nil {
		l.close()
		if errdefs.ClassOf(err) == errdefs.Internal {
			err = errdefs.New(errdefs.FailedPrecondition, "read the root file system: %w", err)
		}
		return nil, err
	}
	return l, nil
}

// measure reads the layer once, for its digests.
func (l *spooledLayer) measure() error {
	if _, err := l.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	whole := sha256.New()
	in := bufio.NewReaderSize(io.TeeReader(l.f, whole), 1<<20)
	magic, _ := in.Peek(262)
	inner := sha256.New()
	var plain io.Reader = in
	l.media = mediaLayer
	if bytes.HasPrefix(magic, []byte{0x1f, 0x8b}) {
		gz, err := gzip.NewReader(in)
		if err != nil {
			return errdefs.DataLossf("the tar is damaged: %w", err)
		}
		plain, l.media = gz, mediaLayer+"+gzip"
	} else if len(magic) < 262 || string(magic[257:262]) != "ustar" {
		return errdefs.Invalidf("this is neither a folder nor a tar, plain or compressed with gzip, of a root file system")
	}
	if _, err := io.Copy(inner, plain); err != nil {
		return errdefs.DataLossf("the tar is damaged: %w", err)
	}
	n, err := io.Copy(io.Discard, in) // what a decompressor leaves unread
	if err != nil || n > 0 && l.media != mediaLayer {
		return errdefs.DataLossf("the tar is damaged: %d bytes follow its end (%w)", n, errors.Join(err, io.ErrUnexpectedEOF))
	}
	fi, err := l.f.Stat()
	if err != nil {
		return err
	}
	l.size, l.digest, l.diffID = fi.Size(), sum(whole), sum(inner)
	return nil
}

func sum(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

func sumOf(b []byte) string {
	h := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(h[:])
}

type ociConfig struct {
	Architecture string     `json:"architecture"`
	OS           string     `json:"os"`
	Config       ociProcess `json:"config"`
	RootFS       ociRootFS  `json:"rootfs"`
}

type ociProcess struct {
	Entrypoint []string `json:"Entrypoint,omitempty"`
	Cmd        []string `json:"Cmd,omitempty"`
	Env        []string `json:"Env,omitempty"`
	User       string   `json:"User,omitempty"`
	WorkingDir string   `json:"WorkingDir,omitempty"`
}

type ociRootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type ociDescriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

type ociManifest struct {
	SchemaVersion int             `json:"schemaVersion"`
	MediaType     string          `json:"mediaType"`
	Config        *ociDescriptor  `json:"config,omitempty"`
	Layers        []ociDescriptor `json:"layers,omitempty"`
	Manifests     []ociDescriptor `json:"manifests,omitempty"`
}

const (
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
)

// layout returns the archive of the image and its size.
func (b *imageBuild) layout(l *spooledLayer) (io.Reader, int64, error) {
	var head bytes.Buffer
	w := tar.NewWriter(&head)
	blob := func(media string, v any) ociDescriptor {
		data, _ := json.Marshal(v) // plain strings and numbers: cannot fail
		d := ociDescriptor{MediaType: media, Digest: sumOf(data), Size: int64(len(data))}
		tarFile(w, blobPath(d.Digest), data)
		return d
	}
	tarFile(w, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	cfg := blob(mediaConfig, ociConfig{
		Architecture: b.arch, OS: "linux",
		Config: ociProcess{Entrypoint: b.entrypointWords, Cmd: b.cmdWords, Env: b.env, User: b.user, WorkingDir: b.workdir},
		RootFS: ociRootFS{Type: "layers", DiffIDs: []string{l.diffID}},
	})
	manifest := blob(mediaManifest, ociManifest{
		SchemaVersion: 2, MediaType: mediaManifest, Config: &cfg,
		Layers: []ociDescriptor{{MediaType: l.media, Digest: l.digest, Size: l.size}},
	})
	index, _ := json.Marshal(ociManifest{SchemaVersion: 2, MediaType: mediaIndex, Manifests: []ociDescriptor{manifest}})
	tarFile(w, "index.json", index)
	_ = w.WriteHeader(tarHeader(blobPath(l.digest), l.size)) // its content follows below, past the writer
	if _, err := l.f.Seek(0, io.SeekStart); err != nil {
		return nil, 0, errdefs.New(errdefs.FailedPrecondition, "read the root file system: %w", err)
	}
	tail := make([]byte, (512-l.size%512)%512+1024) // padding of the layer, and the end of the archive
	total := int64(head.Len()) + l.size + int64(len(tail))
	return io.MultiReader(&head, io.LimitReader(l.f, l.size), bytes.NewReader(tail)), total, nil
}

func blobPath(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }

func tarHeader(name string, size int64) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size}
}

func tarFile(w *tar.Writer, name string, data []byte) {
	// Into memory, with short names: cannot fail.
	_ = w.WriteHeader(tarHeader(name, int64(len(data))))
	_, _ = w.Write(data)
}

// tarFolder writes the tree below root, in the order of names.
func tarFolder(w io.Writer, root string) error {
	tw := tar.NewWriter(w)
	links := map[[2]uint64]string{} // device and inode → first name
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return tarEntry(tw, path, filepath.ToSlash(rel), info, links)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func tarEntry(tw *tar.Writer, path, name string, info fs.FileInfo, links map[[2]uint64]string) (err error) {
	var target string
	switch info.Mode().Type() {
	case 0, fs.ModeDir, fs.ModeNamedPipe:
	case fs.ModeSymlink:
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	default:
		return nil
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	h.ModTime, h.AccessTime, h.ChangeTime = h.ModTime.Truncate(time.Second), time.Time{}, time.Time{}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && st.Nlink > 1 {
		key := [2]uint64{st.Dev, st.Ino}
		if first, again := links[key]; again {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return tw.WriteHeader(h)
		}
		links[key] = name
	}
	if err := tw.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyN(tw, f, h.Size); err != nil {
		return fmt.Errorf("%s changed while it was read: %w", path, err)
	}
	return nil
}
