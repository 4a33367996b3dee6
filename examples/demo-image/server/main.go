// Command server is the HTTP server of the demo image: it shows where it runs and says on stdout who asked.
//
// GET / answers with the host name and the environment, GET /healthz with "ok". It listens on :8080, or on $PORT, and on
// :80 as well where it may. It exits 0 on SIGTERM once the requests under way are answered.
//
// "server get URL" asks a server and prints its answer. If the pod has a service account, it shows that token, and trusts that
// account's authority too, as programs do that ask the API server.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sort"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	work := run
	if len(os.Args) == 3 && os.Args[1] == "get" {
		work = func(ctx context.Context) error { return get(ctx, os.Args[2]) }
	}
	if err := work(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1)
	}
}

// account is where a pod has its service account.
const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func get(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if ca, err := os.ReadFile(account + "ca.crt"); err == nil {
		roots.AppendCertsFromPEM(ca)
	}
	if token, err := os.ReadFile(account + "token"); err == nil && req.URL.Scheme == "https" {
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}

func run(ctx context.Context) error {
	port := cmp.Or(os.Getenv("PORT"), "8080")
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", hello)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	listeners, err := listen(port, "80")
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: logged(mux), ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		done <- srv.Shutdown(grace)
	}()
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		fmt.Println("listening on port", l.Addr().(*net.TCPAddr).Port)
		go func() { ended <- srv.Serve(l) }()
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	err = <-done
	fmt.Println("bye")
	return err
}

// listen opens port, and also the other one unless that is taken or not this user's to open.
func listen(port, also string) ([]net.Listener, error) {
	first, err := net.Listen("tcp", ":"+port)
	if err != nil {
		return nil, err
	}
	second, err := net.Listen("tcp", ":"+also)
	if err != nil {
		return []net.Listener{first}, nil //nolint:nilerr // it is one more way in, and no more than that
	}
	return []net.Listener{first, second}, nil
}

func hello(w http.ResponseWriter, _ *http.Request) {
	host, err := os.Hostname()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	fmt.Fprintf(w, "Hello from %s\n\n", host)
	env := os.Environ()
	sort.Strings(env)
	for _, e := range env {
		fmt.Fprintln(w, e)
	}
}

// logged writes one line a request.
func logged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		next.ServeHTTP(w, r)
		fmt.Printf("%s %s %q from %s in %s\n", start.UTC().Format(time.RFC3339), r.Method, r.URL.Path, r.RemoteAddr, time.Since(start).Round(time.Microsecond))
	})
}
