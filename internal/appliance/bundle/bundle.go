// Package bundle is the file in which a version of Cocoon OS travels: a tar archive with a signed manifest before the files.
//
// A reader gives out no byte that the signer did not sign: the manifest is verified before anything else is used, and each chunk of a
// file before it is read. The package does not write slots and knows no policy of keys.
package bundle

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Names of the files of a version. Each bundle has all of them.
const (
	Version   = "VERSION"     // the version, and a line feed
	Kernel    = "vmlinuz"     // for the boot partition
	Initramfs = "initramfs"   // for the boot partition
	Root      = "rootfs.sqsh" // for the slot
)

// names are the files of each bundle.
var names = []string{Version, Kernel, Initramfs, Root}

const (
	manifestName  = "MANIFEST.json"
	signatureName = "MANIFEST.sig"
	format        = 1
	maxManifest   = 4 << 20 // bytes
	maxFile       = 64 << 30
	context       = "cocoon os bundle v1\n" // before the manifest when it is signed: the key may sign other things

	// ChunkSize is how many bytes of a file are verified at a time. The last chunk is shorter.
	ChunkSize = 4 << 20
)

// Manifest says what is in a bundle.
type Manifest struct {
	Format       int    `json:"format"`
	Version      string `json:"version"`
	MinVersion   string `json:"minVersion,omitempty"` // the oldest version that may be replaced by this one; "": any
	Architecture string `json:"architecture"`         // as Go calls it
	Files        []File `json:"files"`
}

// File is a file of a bundle.
type File struct {
	Name   string   `json:"name"`
	Size   int64    `json:"size"`   // bytes
	SHA256 string   `json:"sha256"` // of all of it, in hexadecimal digits
	Chunks []string `json:"chunks"` // of each ChunkSize bytes, likewise
}

// Find returns the file of that name.
func (m Manifest) Find(name string) (File, bool) {
	for _, f := range m.Files {
		if f.Name == name {
			return f, true
		}
	}
	return File{}, false
}

// ID is a short name of the bundle with this manifest, which fits the boot environment. Two bundles with different content have different ids.
func (m Manifest) ID() string {
	b, err := json.Marshal(m)
	if err != nil { // strings and numbers always can be written
		panic(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// System is what an update must fit to.
type System struct {
	Version        string // "": unknown, which any version may replace
	Architecture   string
	SlotSize       int64 // bytes
	AllowDowngrade bool
}

// Check refuses a version that is not for the system: another architecture, a root that is larger than the slot, an older version unless that
// is allowed, or one that needs a newer one before it.
func (m Manifest) Check(on System) error {
	root, _ := m.Find(Root)
	switch {
	case m.Architecture != on.Architecture:
		return errdefs.Invalidf("version %s is for %s; this machine is %s", m.Version, m.Architecture, on.Architecture)
	case root.Size > on.SlotSize:
		return errdefs.Preconditionf("the root of version %s has %d bytes, and a slot %d; install it again with larger slots", m.Version, root.Size, on.SlotSize)
	case on.Version == "":
	case Compare(m.Version, on.Version) < 0 && !on.AllowDowngrade:
		return errdefs.Preconditionf("version %s is older than %s, which runs; allow the downgrade", m.Version, on.Version)
	case m.MinVersion != "" && Compare(on.Version, m.MinVersion) < 0:
		return errdefs.Preconditionf("version %s needs at least %s before it, and %s runs; update to that first", m.Version, m.MinVersion, on.Version)
	}
	return nil
}

// parse reads a manifest whose signature has been verified.
func parse(b []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return m, errdefs.Invalidf("read the manifest of the bundle: %w", err)
	}
	switch {
	case m.Format != format:
		return m, errdefs.Unsupportedf("the bundle has format %d; this version reads %d", m.Format, format)
	case !validVersion(m.Version):
		return m, errdefs.Invalidf("the bundle has the version %q", m.Version)
	case m.MinVersion != "" && !validVersion(m.MinVersion):
		return m, errdefs.Invalidf("the bundle has the minimal version %q", m.MinVersion)
	}
	had := map[string]bool{}
	for _, f := range m.Files {
		chunks := (f.Size + ChunkSize - 1) / ChunkSize
		switch {
		case f.Name == "" || strings.ContainsAny(f.Name, "/\x00") || f.Name == manifestName || f.Name == signatureName || had[f.Name]:
			return m, errdefs.Invalidf("the bundle has the file name %q", f.Name)
		case f.Size < 0 || f.Size > maxFile || int64(len(f.Chunks)) != chunks:
			return m, errdefs.Invalidf("%s of the bundle has %d bytes and %d chunks", f.Name, f.Size, len(f.Chunks))
		}
		had[f.Name] = true
	}
	for _, name := range names {
		if !had[name] {
			return m, errdefs.Invalidf("the bundle has no %s", name)
		}
	}
	return m, nil
}

func validVersion(v string) bool {
	if v == "" || len(v) > 64 {
		return false
	}
	for _, c := range v {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+~_-", c) {
			return false
		}
	}
	return true
}

func signed(manifest []byte) []byte { return append([]byte(context), manifest...) }

func verify(manifest, signature []byte, keys []ed25519.PublicKey) bool {
	for _, k := range keys {
		if len(k) == ed25519.PublicKeySize && ed25519.Verify(k, signed(manifest), signature) {
			return true
		}
	}
	return false
}
