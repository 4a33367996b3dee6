package epoch

import (
	"crypto/tls"
	"log/slog"
	"os"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const lookEvery = 10 * time.Second

// certificate is a serving certificate that is reloaded when its files change, so that it can be renewed without a
// restart. While the new files are invalid, the old certificate stays in use.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	pair   *tls.Certificate
	seen   [2]time.Time
	looked time.Time
}

func loadCertificate(cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log, looked: time.Now(), seen: modified(cert, key)}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, errdefs.Preconditionf("serving certificate: %w", err)
	}
	c.pair = &pair
	return c, nil
}

func modified(paths ...string) (at [2]time.Time) {
	for i, p := range paths {
		if fi, err := os.Stat(p); err == nil {
			at[i] = fi.ModTime()
		}
	}
	return at
}

// get is tls.Config.GetCertificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.looked) < lookEvery {
		return c.pair, nil
	}
	c.looked = time.Now()
	at := modified(c.cert, c.key)
	if at == c.seen {
		return c.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.log.Warn("serving certificate unusable, the previous one stays in use", "err", err)
		return c.pair, nil
	}
	c.pair, c.seen = &pair, at
	c.log.Info("serving certificate reloaded")
	return c.pair, nil
}
