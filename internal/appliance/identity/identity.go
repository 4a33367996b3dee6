// Package identity says which machine an appliance is, and who may use it: its id, its certificate, and the keys of its operators.
//
// It serves nothing: the door asks it about each call. Capsule's documents call this auth.
package identity

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// ClaimWindow is how long after its boot a machine without keys can be adopted.
const ClaimWindow = 30 * time.Minute

// the name of the only document of its table
const self = "self"

// document is the machine, as it is stored.
type document struct {
	ID          string `json:"capsule_id"`
	ShortID     string `json:"short_id"`
	Certificate string `json:"certificate"` // PEM
	Key         string `json:"key"`         // PEM, PKCS #8
	AdoptedAt   int64  `json:"adopted_at,omitempty"`
	AdoptedBy   string `json:"adopted_by,omitempty"`
}

// Key is a key of an operator.
type Key struct {
	Public  ed25519.PublicKey `json:"public"`
	Name    string            `json:"name"`
	Role    capsulev1.Role    `json:"role"`
	AddedBy string            `json:"added_by,omitempty"` // kid; "" by adoption
	AddedAt time.Time         `json:"added_at"`
}

// Kid returns the name of the key in tokens.
func (k Key) Kid() string { return capsulewire.Kid(k.Public) }

// Config configures a Keeper.
type Config struct {
	Documents journal.Documents
	// Reset is the path of a file by which somebody at the machine removes all keys; see Keeper. "": there is none.
	Reset string
	// Used is the path of a file with the tokens that were used and have not expired. "": they are forgotten when the daemon ends.
	Used string
	// Age returns the time since the machine has booted. It must not depend on the clock, which may jump.
	Age func() time.Duration
	Now func() time.Time
	Log *slog.Logger
}

// Keeper keeps the identity and the keys. Safe for concurrent use.
//
// Recovery: if Open finds the file Config.Reset, made less than ResetAge ago, it removes all keys and the file, and the machine can be
// adopted again. Who can write there owns the machine's disk.
type Keeper struct {
	cfg         Config
	id, shortID string
	certificate tls.Certificate
	replay      *replay

	mu     sync.Mutex
	keys   map[string]Key
	opened time.Duration // age of the machine when its claim window opened
}

// Open reads the identity, and makes one at the first start.
// Errors: DataLoss if what is stored is damaged. Then nobody can adopt the machine.
func Open(ctx context.Context, cfg Config) (*Keeper, error) {
	k := &Keeper{cfg: cfg, keys: map[string]Key{}}
	err := k.open(ctx)
	if err == nil {
		k.replay, err = openReplay(cfg.Used, cfg.Now())
	}
	if err != nil {
		return nil, fmt.Errorf("identity of the machine: %w", err)
	}
	return k, nil
}

// Close releases the file of used tokens. The keeper is not used any more.
func (k *Keeper) Close() error { return k.replay.close() }

func (k *Keeper) open(ctx context.Context) error {
	d, err := k.load(ctx)
	if err != nil {
		return err
	}
	k.id, k.shortID = d.ID, d.ShortID
	if k.certificate, err = tls.X509KeyPair([]byte(d.Certificate), []byte(d.Key)); err != nil {
		return errdefs.New(errdefs.DataLoss, "its certificate is damaged: %w", err)
	}
	all, err := k.cfg.Documents.List(ctx, journal.Keys)
	if err != nil {
		return err
	}
	for _, x := range all {
		var key Key
		if err := json.Unmarshal(x.Data, &key); err != nil || len(key.Public) != ed25519.PublicKeySize || key.Kid() != x.Name {
			return errdefs.DataLossf("the key %s is damaged", x.Name)
		}
		k.keys[x.Name] = key
	}
	return k.reset(ctx)
}

// load reads the document of the machine, or makes it.
func (k *Keeper) load(ctx context.Context) (document, error) {
	data, err := k.cfg.Documents.Get(ctx, journal.Identity, self)
	switch {
	case errdefs.IsNotFound(err):
		return k.create(ctx)
	case err != nil:
		return document{}, err
	}
	var d document
	if err := json.Unmarshal(data, &d); err != nil || d.ID == "" {
		return d, errdefs.DataLossf("its record is damaged")
	}
	return d, nil
}

func (k *Keeper) create(ctx context.Context) (document, error) {
	d, err := generate()
	if err != nil {
		return d, err
	}
	data, err := json.Marshal(d)
	if err != nil {
		return d, err
	}
	k.cfg.Log.Info("the machine has a new identity", "capsule_id", d.ID, "short_id", d.ShortID)
	return d, k.cfg.Documents.Write(ctx, journal.Change{Table: journal.Identity, Name: self, Data: data, New: true})
}

// generate returns a new identity. Its certificate never expires, because clients pin it.
func generate() (document, error) {
	machine, err := uuid.NewRandom()
	if err != nil {
		return document{}, err
	}
	id := machine.String()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return document{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return document{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: id}, DNSNames: []string{"localhost", id},
		// The clock of the machine may be wrong, even before 1980.
		NotBefore: time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // RFC 5280, 4.1.2.5
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return document{}, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return document{}, err
	}
	return document{
		ID: id, ShortID: shortID(id),
		Certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		Key:         string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})),
	}, nil
}

// shortID returns the name for people of the machine with that UUID.
func shortID(id string) string { return "capsule-" + id[:4] }

// Temporary returns a certificate that nobody has seen before, for a machine that cannot say who it is.
func Temporary() (tls.Certificate, error) {
	d, err := generate()
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair([]byte(d.Certificate), []byte(d.Key))
}

// ID returns the UUID of the machine, which is the audience of tokens.
func (k *Keeper) ID() string { return k.id }

// ShortID returns the name of the machine for people.
func (k *Keeper) ShortID() string { return k.shortID }

// Certificate returns the certificate of the server.
func (k *Keeper) Certificate() tls.Certificate { return k.certificate }

// Fingerprint returns the SHA-256 of the certificate that clients pin.
func (k *Keeper) Fingerprint() string { return capsulewire.Fingerprint(k.certificate.Certificate[0]) }

// Adopted reports whether somebody may use the machine.
func (k *Keeper) Adopted() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.keys) > 0
}

// Adopt enrolls the first key with all rights, while the claim window is open. For a key that is enrolled it does nothing.
// Errors: InvalidArgument, FailedPrecondition.
func (k *Keeper) Adopt(ctx context.Context, public []byte, name string) (Key, error) {
	key, err := k.key(public, cmp.Or(name, "operator"), capsulev1.Role_ROLE_ADMIN, "")
	if err != nil {
		return key, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if known, ok := k.keys[key.Kid()]; ok {
		return known, nil
	}
	switch {
	case len(k.keys) > 0:
		return key, errdefs.Preconditionf("the adoption window closed when the machine was adopted; ask one of its operators to add your key")
	case k.cfg.Age()-k.opened >= ClaimWindow:
		return key, errdefs.Preconditionf("the adoption window closed %s after the machine booted; reboot the machine, and adopt it then", ClaimWindow)
	}
	d, err := k.load(ctx)
	if err != nil {
		return key, err
	}
	d.AdoptedAt, d.AdoptedBy = k.cfg.Now().Unix(), key.Kid()
	adopted, err := json.Marshal(d)
	if err != nil {
		return key, err
	}
	if err := k.put(ctx, key, journal.Change{Table: journal.Identity, Name: self, Data: adopted}); err != nil {
		return key, err
	}
	k.cfg.Log.Info("the machine is adopted", "kid", key.Kid(), "name", key.Name)
	return key, nil
}

// Add enrolls a key. The unspecified role is that of an administrator. Errors: InvalidArgument, AlreadyExists.
func (k *Keeper) Add(ctx context.Context, public []byte, name string, role capsulev1.Role, by string) (Key, error) {
	key, err := k.key(public, name, role, by)
	if err != nil {
		return key, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if known, ok := k.keys[key.Kid()]; ok {
		return key, errdefs.Existsf("this key is enrolled already, with the name %q; remove it first to change it", known.Name)
	}
	return key, k.put(ctx, key)
}

// key checks the parts of a key.
func (k *Keeper) key(public []byte, name string, role capsulev1.Role, by string) (Key, error) {
	return makeKey(public, name, role, by, k.cfg.Now())
}

func makeKey(public []byte, name string, role capsulev1.Role, by string, at time.Time) (Key, error) {
	if len(public) != ed25519.PublicKeySize {
		return Key{}, errdefs.Invalidf("the public key has %d bytes; one of Ed25519 has %d", len(public), ed25519.PublicKeySize)
	}
	if name == "" || len(name) > 128 || !printable(name) {
		return Key{}, errdefs.Invalidf("the name %.140q of the key is not 1 to 128 bytes of printable text", name)
	}
	role = cmp.Or(role, capsulev1.Role_ROLE_ADMIN)
	if _, ok := capsulev1.Role_name[int32(role)]; !ok {
		return Key{}, errdefs.Invalidf("there is no role %d; use view, operate or admin", role)
	}
	return Key{Public: slices.Clone(public), Name: name, Role: role, AddedBy: by, AddedAt: at.UTC()}, nil
}

// put stores a key together with other changes. Precondition: mu is held.
func (k *Keeper) put(ctx context.Context, key Key, with ...journal.Change) error {
	data, err := json.Marshal(key)
	if err != nil {
		return err
	}
	if err := k.cfg.Documents.Write(ctx, append(with, journal.Change{Table: journal.Keys, Name: key.Kid(), Data: data})...); err != nil {
		return err
	}
	k.keys[key.Kid()] = key
	return nil
}

// Keys returns the keys, the oldest first.
func (k *Keeper) Keys() []Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]Key, 0, len(k.keys))
	for _, key := range k.keys {
		all = append(all, key)
	}
	slices.SortFunc(all, func(a, b Key) int { return cmp.Or(a.AddedAt.Compare(b.AddedAt), cmp.Compare(a.Kid(), b.Kid())) })
	return all
}

// Remove removes a key. Errors: NotFound, FailedPrecondition for the last key of an administrator.
func (k *Keeper) Remove(ctx context.Context, kid string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	key, ok := k.keys[kid]
	if !ok {
		return errdefs.NotFoundf("there is no key %q", kid)
	}
	others := 0
	for _, x := range k.keys {
		if x.Role == capsulev1.Role_ROLE_ADMIN && x.Kid() != kid {
			others++
		}
	}
	if key.Role == capsulev1.Role_ROLE_ADMIN && others == 0 {
		return errdefs.Preconditionf("%q is the last key of an administrator; add another one first, or nobody can manage the machine", key.Name)
	}
	if err := k.cfg.Documents.Write(ctx, journal.Change{Table: journal.Keys, Name: kid}); err != nil {
		return err
	}
	delete(k.keys, kid)
	return nil
}

func printable(s string) bool {
	for _, r := range s {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return false
		}
	}
	return true
}
