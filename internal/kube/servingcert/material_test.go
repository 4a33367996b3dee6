package servingcert

import (
	"bytes"
	"crypto/x509"
	"slices"
	"testing"
	"time"
)

var hosts = []string{"cocoon-manager.cocoon-system.svc", "127.0.0.1"}

// verify checks the serving certificate like a client that trusts the authorities.
func verify(t *testing.T, m material, trusted []*x509.Certificate, now time.Time) {
	t.Helper()
	roots := x509.NewCertPool()
	for _, c := range trusted {
		roots.AddCert(c)
	}
	for _, h := range hosts {
		if _, err := m.serving.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: h, CurrentTime: now}); err != nil {
			t.Fatalf("%s at %s: %v", h, now, err)
		}
	}
}

// A client that loaded the authorities one overlap ago trusts the certificate. The test simulates a year with short lifetimes,
// with four checks a day.
func TestRotation(t *testing.T) {
	l := Lives{Authority: 60 * 24 * time.Hour, Serving: 10 * 24 * time.Hour, Overlap: 12 * time.Hour}
	begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var m material
	var known []*x509.Certificate // the authorities that a slow client has loaded
	authorities, servings := map[string]bool{}, map[string]bool{}
	for now := begin; now.Before(begin.AddDate(1, 0, 0)); now = now.Add(l.Overlap / 2) {
		known = m.authorities
		next, changed, err := m.next(now, hosts, l)
		if err != nil {
			t.Fatal(err)
		}
		if len(known) > 0 {
			verify(t, next, known, now)
		}
		if changed { // the stored data must decode to the same material
			data, err := next.data()
			if err != nil {
				t.Fatal(err)
			}
			next = read(data)
		}
		if again, changed, err := next.next(now, hosts, l); err != nil || changed || !bytes.Equal(again.bundle(), next.bundle()) {
			t.Fatalf("at %s a second call of next changed the material: %v", now, err)
		}
		m = next
		verify(t, m, m.authorities, now)
		if len(m.authorities) > 2 {
			t.Fatalf("%d authorities are trusted", len(m.authorities))
		}
		authorities[string(m.authorities[0].Raw)], servings[string(m.serving.Leaf.Raw)] = true, true
	}
	if len(authorities) < 6 || len(servings) < 50 {
		t.Errorf("%d authorities and %d certificates in a year", len(authorities), len(servings))
	}
}

// Only damaged or lost data is replaced.
func TestRepair(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	good, _, err := material{}.next(now, hosts, Default)
	if err != nil {
		t.Fatal(err)
	}
	data, err := good.data()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		damage        func(map[string][]byte)
		hosts         []string
		sameAuthority bool
		sameServing   bool
	}{
		"nothing":                  {func(map[string][]byte) {}, hosts, true, true},
		"fewer hosts":              {func(map[string][]byte) {}, hosts[:1], true, true},
		"another host":             {func(map[string][]byte) {}, []string{"::1"}, true, false},
		"no authority":             {func(d map[string][]byte) { delete(d, keyCACert) }, hosts, false, false},
		"authority's key is lost":  {func(d map[string][]byte) { delete(d, keyCAKey) }, hosts, false, true},
		"key of another authority": {func(d map[string][]byte) { d[keyCAKey] = d[keyKey] }, hosts, false, true},
		"serving key is lost":      {func(d map[string][]byte) { d[keyKey] = []byte("x") }, hosts, true, false},
		"everything is garbage":    {func(d map[string][]byte) { clear(d); d[keyCACert] = []byte("x") }, hosts, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := map[string][]byte{}
			for k, v := range data {
				d[k] = slices.Clone(v)
			}
			c.damage(d)
			m, changed, err := read(d).next(now, c.hosts, Default)
			if err != nil {
				t.Fatal(err)
			}
			if changed == (c.sameAuthority && c.sameServing) {
				t.Errorf("changed: %v", changed)
			}
			if got := m.authorities[0].Equal(good.authorities[0]); got != c.sameAuthority {
				t.Errorf("the authority is the same: %v", got)
			}
			if got := m.serving.Leaf.Equal(good.serving.Leaf); got != c.sameServing {
				t.Errorf("the certificate is the same: %v", got)
			}
			if m.signer == nil || len(m.missing(c.hosts)) > 0 || !m.valid(now) {
				t.Error("the material has no serving certificate")
			}
			if c.sameAuthority {
				verify(t, m, good.authorities, now)
			}
		})
	}
}

// FuzzRead reads a Secret with any content.
func FuzzRead(f *testing.F) {
	good, _, err := material{}.next(time.Now(), hosts, Default)
	if err != nil {
		f.Fatal(err)
	}
	data, err := good.data()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data[keyCACert], data[keyCAKey], data[keyCert], data[keyKey])
	f.Add([]byte("x"), []byte(nil), data[keyCACert], data[keyCAKey])
	f.Fuzz(func(t *testing.T, a, b, c, d []byte) {
		m, _, err := read(map[string][]byte{keyCACert: a, keyCAKey: b, keyCert: c, keyKey: d}).next(time.Now(), hosts, Default)
		if err != nil || !m.valid(time.Now()) || m.signer == nil {
			t.Fatalf("the material has no serving certificate: %v", err)
		}
	})
}
