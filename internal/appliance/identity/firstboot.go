package identity

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// maxSeal bounds the file of a seal, in bytes.
const maxSeal = 64 << 10

// Seal is who a machine that is about to be installed will be: its identity, and its first operator. The names of its fields are the documented ones.
type Seal struct {
	ID           string `json:"capsule_id"`
	ShortID      string `json:"short_id"`
	Certificate  string `json:"tls_cert_pem"`
	PrivateKey   string `json:"tls_key_pem"`     // PEM, PKCS #8
	Operator     []byte `json:"operator_pubkey"` // of Ed25519
	OperatorName string `json:"operator_name"`
}

// NewSeal returns a new identity without an operator.
func NewSeal() (Seal, error) {
	d, err := generate()
	return Seal{ID: d.ID, ShortID: d.ShortID, Certificate: d.Certificate, PrivateKey: d.Key}, err
}

// TLS returns the certificate of the machine with its key. Errors: DataLoss.
func (s Seal) TLS() (tls.Certificate, error) {
	c, err := tls.X509KeyPair([]byte(s.Certificate), []byte(s.PrivateKey))
	if err != nil {
		return c, errdefs.New(errdefs.DataLoss, "the certificate is damaged: %w", err)
	}
	return c, nil
}

// For returns the seal with its first operator, who has all rights. Errors: InvalidArgument.
func (s Seal) For(public []byte, name string) (Seal, Key, error) {
	key, err := makeKey(public, cmp.Or(name, "operator"), capsulev1.Role_ROLE_ADMIN, "", time.Unix(0, 0))
	if err != nil {
		return s, key, err
	}
	s.Operator, s.OperatorName = key.Public, key.Name
	return s, key, nil
}

// Encode returns the content of the file that Unseal takes. It has a private key.
func (s Seal) Encode() ([]byte, error) { return json.Marshal(s) }

// ParseSeal reads what Encode wrote. Errors: DataLoss for anything else.
func ParseSeal(text []byte) (Seal, error) {
	var s Seal
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return Seal{}, errdefs.DataLossf("it is no seal: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Seal{}, errdefs.DataLossf("it is no seal: something follows it")
	}
	if id, err := uuid.Parse(s.ID); err != nil || id.String() != s.ID || s.ShortID != shortID(s.ID) {
		return Seal{}, errdefs.DataLossf("it is no seal: the ids %.64q and %.64q are none", s.ID, s.ShortID)
	}
	if _, err := s.TLS(); err != nil {
		return Seal{}, err
	}
	if _, err := makeKey(s.Operator, s.OperatorName, capsulev1.Role_ROLE_ADMIN, "", time.Unix(0, 0)); err != nil {
		return Seal{}, errdefs.DataLossf("it is no seal: %w", err)
	}
	return s, nil
}

// Unseal makes this machine the one of the seal at path, and removes the file. A power cut before that leads to the same result at the next start: what is stored
// already is not stored again. A machine that has another identity keeps it, and the file is left alone. Without the file it does nothing.
// Errors: DataLoss for a file that is damaged, or that others could have written: then nobody may adopt the machine.
func Unseal(ctx context.Context, docs journal.Documents, path string, now time.Time, log *slog.Logger) error {
	text, err := readSeal(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var s Seal
	if err == nil {
		s, err = ParseSeal(text)
	}
	if err != nil {
		return fmt.Errorf("take the identity that was sealed at the installation from %s: %w", path, err)
	}
	data, err := docs.Get(ctx, journal.Identity, self)
	var had document
	switch {
	case errdefs.IsNotFound(err):
		if err := s.store(ctx, docs, now); err != nil {
			return err
		}
		log.Info("the machine has the identity of its installation", "capsule_id", s.ID, "short_id", s.ShortID, "name", s.OperatorName)
	case err != nil:
		return err
	case json.Unmarshal(data, &had) != nil || had.ID != s.ID:
		log.Warn("the identity that was sealed at the installation is not used: the machine has another one", "path", path)
		return nil //nolint:nilerr // whoever opens an identity that is damaged says so
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the seal: %w", err)
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

// store makes the machine that of the seal, adopted by its operator, at once.
func (s Seal) store(ctx context.Context, docs journal.Documents, now time.Time) error {
	key, err := makeKey(s.Operator, s.OperatorName, capsulev1.Role_ROLE_ADMIN, "", now)
	if err != nil {
		return err
	}
	machine, err := json.Marshal(document{ID: s.ID, ShortID: s.ShortID, Certificate: s.Certificate, Key: s.PrivateKey, AdoptedAt: now.Unix(), AdoptedBy: key.Kid()})
	if err != nil {
		return err
	}
	operator, err := json.Marshal(key)
	if err != nil {
		return err
	}
	return docs.Write(
		ctx, journal.Change{Table: journal.Identity, Name: self, Data: machine, New: true}, journal.Change{Table: journal.Keys, Name: key.Kid(), Data: operator, New: true},
	)
}

// readSeal reads a file that only root can have written and read.
func readSeal(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, errdefs.DataLossf("it is a symbolic link")
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return nil, errdefs.DataLossf("it is no file that only this user can read and write")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxSeal+1))
	if err == nil && len(text) > maxSeal {
		err = errdefs.DataLossf("it has more than %d bytes", maxSeal)
	}
	return text, err
}
