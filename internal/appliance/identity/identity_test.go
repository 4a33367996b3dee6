package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
)

// machine is a machine whose clocks the test sets.
type machine struct {
	t     *testing.T
	dir   string
	docs  *sqlite.Documents
	age   time.Duration
	now   time.Time
	k     *Keeper
	reset string
}

func boot(t *testing.T) *machine {
	m := &machine{t: t, dir: t.TempDir(), now: time.Now()}
	m.reset = filepath.Join(m.dir, "RESET_AUTH")
	m.start()
	t.Cleanup(func() { _ = m.docs.Close() })
	return m
}

// start starts the daemon, for which the one before has ended.
func (m *machine) start() {
	m.t.Helper()
	if m.docs != nil {
		_ = m.docs.Close()
	}
	var err error
	if m.docs, err = sqlite.OpenDocuments(m.t.Context(), filepath.Join(m.dir, "state.db")); err != nil {
		m.t.Fatal(err)
	}
	if m.k, err = Open(m.t.Context(), m.config()); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) config() Config {
	return Config{
		Documents: m.docs, Reset: m.reset, Used: filepath.Join(m.dir, "tokens.used"), Log: slog.New(slog.DiscardHandler),
		Age: func() time.Duration { return m.age }, Now: func() time.Time { return m.now },
	}
}

func newKey(t *testing.T) (ed25519.PublicKey, ed25519.PrivateKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return public, private
}

func (m *machine) adopt(public []byte, want errdefs.Class) {
	m.t.Helper()
	_, err := m.k.Adopt(m.t.Context(), public, "")
	m.is("adopt", err, want)
}

func (m *machine) is(what string, err error, want errdefs.Class) {
	m.t.Helper()
	if err == nil && want != 0 || err != nil && (want == 0 || errdefs.ClassOf(err) != want) {
		m.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// The identity is the same after each start.
func TestIdentityStays(t *testing.T) {
	m := boot(t)
	id, fingerprint := m.k.ID(), m.k.Fingerprint()
	if m.k.ShortID() != "capsule-"+id[:4] || len(id) != 36 {
		t.Errorf("id %q, short id %q", id, m.k.ShortID())
	}
	leaf, err := x509.ParseCertificate(m.k.Certificate().Certificate[0])
	if err != nil || leaf.NotAfter.Year() != 9999 || leaf.NotBefore.After(time.Unix(0, 0)) {
		t.Errorf("certificate: %v, from %v to %v", err, leaf.NotBefore, leaf.NotAfter)
	}
	m.start()
	if m.k.ID() != id || m.k.Fingerprint() != fingerprint {
		t.Errorf("after a restart it is %s with %s, and was %s with %s", m.k.ID(), m.k.Fingerprint(), id, fingerprint)
	}
}

// Only the first key can adopt a machine, and only soon after its boot.
func TestAdopt(t *testing.T) {
	m := boot(t)
	first, _ := newKey(t)
	second, _ := newKey(t)
	m.adopt(first[:31], errdefs.InvalidArgument)
	m.age = ClaimWindow
	m.adopt(first, errdefs.FailedPrecondition)
	m.start() // a daemon that starts again does not open the window
	m.adopt(first, errdefs.FailedPrecondition)
	m.age = 0 // the machine has booted
	m.adopt(first, 0)
	m.adopt(first, 0)
	m.adopt(second, errdefs.FailedPrecondition)
	m.start()
	m.adopt(second, errdefs.FailedPrecondition)
	if _, err := m.k.Adopt(t.Context(), second, ""); err == nil || !strings.Contains(err.Error(), "adoption window closed") { // the documented clients look for these words
		t.Errorf("%v", err)
	}
	if keys := m.k.Keys(); len(keys) != 1 || keys[0].Name != "operator" || keys[0].Role != capsulev1.Role_ROLE_ADMIN || keys[0].AddedBy != "" {
		t.Errorf("keys %+v", keys)
	}
}

func TestKeys(t *testing.T) {
	m := boot(t)
	ctx := t.Context()
	first, _ := newKey(t)
	second, _ := newKey(t)
	third, _ := newKey(t)
	m.adopt(first, 0)
	kid := capsulewire.Kid(first)
	add := func(public []byte, name string, role capsulev1.Role, want errdefs.Class) {
		t.Helper()
		_, err := m.k.Add(ctx, public, name, role, kid)
		m.is("add "+name, err, want)
	}
	add(second, "", 0, errdefs.InvalidArgument)
	add(second, "a\x1b[2J", 0, errdefs.InvalidArgument)
	add(second, "ops", 9, errdefs.InvalidArgument)
	add(second, "ops", capsulev1.Role_ROLE_VIEW, 0)
	add(second, "ops", capsulev1.Role_ROLE_ADMIN, errdefs.AlreadyExists)
	m.is("remove nobody", m.k.Remove(ctx, "x"), errdefs.NotFound)
	m.is("remove the last admin", m.k.Remove(ctx, kid), errdefs.FailedPrecondition)
	add(third, "admin", capsulev1.Role_ROLE_UNSPECIFIED, 0)
	m.is("remove an admin", m.k.Remove(ctx, kid), 0)
	m.start()
	var names []string
	for _, key := range m.k.Keys() {
		names = append(names, key.Name)
	}
	if strings.Join(names, " ") != "ops admin" && strings.Join(names, " ") != "admin ops" { // both were added at the same time
		t.Errorf("keys %q", names)
	}
}

func TestAuthenticate(t *testing.T) {
	m := boot(t)
	public, private := newKey(t)
	_, stranger := newKey(t)
	m.adopt(public, 0)
	mint := func(key ed25519.PrivateKey, audience string) string {
		t.Helper()
		token, err := capsulewire.Mint(key, audience, m.now)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	token := mint(private, m.k.ID())
	key, err := m.k.Authenticate(token)
	if err != nil || key.Kid() != capsulewire.Kid(public) || key.Role != capsulev1.Role_ROLE_ADMIN {
		t.Errorf("%+v, %v", key, err)
	}
	for name, token := range map[string]string{
		"replayed": token, "of a stranger": mint(stranger, m.k.ID()), "for another machine": mint(private, "other"), "none": "",
	} {
		if _, err := m.k.Authenticate(token); !errdefs.Is(err, errdefs.Unauthenticated) {
			t.Errorf("token %s: %v", name, err)
		}
	}
	// A removed key is refused at once.
	other, _ := newKey(t)
	if _, err := m.k.Add(t.Context(), other, "other", 0, ""); err != nil {
		t.Fatal(err)
	}
	token = mint(private, m.k.ID())
	m.is("remove", m.k.Remove(t.Context(), capsulewire.Kid(public)), 0)
	if _, err := m.k.Authenticate(token); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("a removed key: %v", err)
	}
}

// Tokens are remembered until they expire, and their number is bounded.
func TestReplay(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	r, err := openReplay("", now)
	if err != nil {
		t.Fatal(err)
	}
	c := capsulewire.Claims{Kid: "k", ID: "1", Expires: now.Add(time.Minute)}
	if err := r.see(c, now); err != nil {
		t.Fatal(err)
	}
	if err := r.see(c, now.Add(time.Minute)); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("%v", err)
	}
	for i := range maxSeen - 1 {
		r.seen[fmt.Sprint(i)] = now.Add(time.Hour)
	}
	full := capsulewire.Claims{Kid: "k", ID: "2", Expires: now.Add(time.Hour)}
	if err := r.see(full, now); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("%v", err)
	}
	if err := r.see(full, now.Add(2*time.Minute)); err != nil { // the first has expired
		t.Error(err)
	}
}

// A token that was used is refused also after a restart of the daemon, and forgotten when it has expired. The file does not grow without end.
func TestReplayOverARestart(t *testing.T) {
	path, now := filepath.Join(t.TempDir(), "used"), time.Unix(1_000_000, 0)
	open := func(now time.Time) *replay {
		t.Helper()
		r, err := openReplay(path, now)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.close() })
		return r
	}
	r := open(now)
	c := capsulewire.Claims{Kid: "k", ID: "1", Expires: now.Add(time.Minute)}
	odd := capsulewire.Claims{Kid: "k", ID: "2\n3\t4", Expires: now.Add(time.Minute)}
	for _, c := range []capsulewire.Claims{c, odd} {
		if err := r.see(c, now); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, _ = f.WriteString("garbage\nk 5\tx\nk 6\t10000")
	if fi, err := f.Stat(); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), ".used.tmp-123"), nil, 0o600); err != nil { // of a daemon that was killed while it started
		t.Fatal(err)
	}
	r = open(now.Add(time.Minute))
	if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
		t.Errorf("there are %v, %v", files, err)
	}
	if err := r.see(c, now.Add(time.Minute)); !errdefs.Is(err, errdefs.Unauthenticated) || len(r.seen) != 1 {
		t.Errorf("%v, %v", err, r.seen)
	}
	later := now.Add(2 * time.Minute)
	if r = open(later); len(r.seen) != 0 {
		t.Errorf("%v", r.seen)
	}
	for i := range maxExpired + 1 {
		if err := r.see(capsulewire.Claims{Kid: "k", ID: fmt.Sprint(i), Expires: later}, later); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.see(c, later.Add(2*time.Minute)); err != nil || r.lines > 2 {
		t.Errorf("%v, %d lines", err, r.lines)
	}
	if fi, err := os.Stat(path); err != nil || fi.Size() > 100 {
		t.Errorf("%v, %v", fi.Size(), err)
	}
}

// Somebody who can write to the disk of the machine can open it again, by a file that is new.
func TestReset(t *testing.T) {
	m := boot(t)
	first, _ := newKey(t)
	second, _ := newKey(t)
	m.adopt(first, 0)
	m.age = time.Hour
	touch := func(age time.Duration) {
		t.Helper()
		if err := os.WriteFile(m.reset, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(m.reset, time.Time{}, m.now.Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	for _, age := range []time.Duration{ResetAge + time.Second, -ResetAge - time.Second} {
		touch(age)
		m.start()
		m.adopt(second, errdefs.FailedPrecondition)
	}
	touch(time.Second)
	m.start()
	if _, err := os.Lstat(m.reset); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
	m.age += ClaimWindow - time.Second
	m.adopt(second, 0)
	if keys := m.k.Keys(); len(keys) != 1 {
		t.Errorf("keys %+v", keys)
	}
	m.age = time.Hour * 9
	m.start() // once
	if !m.k.Adopted() {
		t.Error("the keys are gone again")
	}
}

// A machine whose state is damaged offers itself to nobody.
func TestDamaged(t *testing.T) {
	for name, change := range map[string]journal.Change{
		"identity":    {Table: journal.Identity, Name: self, Data: []byte("{")},
		"empty":       {Table: journal.Identity, Name: self, Data: []byte("{}")},
		"certificate": {Table: journal.Identity, Name: self, Data: []byte(`{"capsule_id":"x","certificate":"y"}`)},
		"key":         {Table: journal.Keys, Name: "x", Data: []byte(`{"public":"AAAA"}`)},
	} {
		m := boot(t)
		if err := m.docs.Write(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(context.WithoutCancel(t.Context()), m.config()); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
