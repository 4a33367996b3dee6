// Package coredns is CoreDNS with the plugins that a cluster's DNS needs, and
// without those for clouds and other services. It only includes it in this binary.
package coredns

import (
	"flag"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

// serverType is CoreDNS's name in the library that reads its file.
const serverType = "dns"

// Main runs CoreDNS with the Corefile of --conf until a signal arrives, and
// returns the exit code.
func Main(args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet("cocoon-up coredns", flag.ContinueOnError)
	fs.SetOutput(stderr)
	path := fs.String("conf", "", "Corefile (required)")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if *path == "" || fs.NArg() > 0 {
		fmt.Fprintln(stderr, "usage: cocoon-up coredns --conf FILE")
		return 2
	}
	log.SetFlags(0) // each line says when and how bad in CoreDNS's own format
	log.SetOutput(stderr)
	caddy.Quiet, dnsserver.Quiet = true, true
	caddy.AppName = "CoreDNS"
	caddy.RegisterCaddyfileLoader("flag", caddy.LoaderFunc(func(string) (caddy.Input, error) { // the plugin reload reads it again
		data, err := os.ReadFile(*path)
		if err != nil {
			return nil, err
		}
		return caddy.CaddyfileInput{Contents: data, Filepath: *path, ServerTypeName: serverType}, nil
	}))
	caddy.TrapSignals()
	file, err := caddy.LoadCaddyfile(serverType)
	if err != nil {
		fmt.Fprintln(stderr, "coredns:", err)
		return 1
	}
	server, err := caddy.Start(file)
	if err != nil {
		fmt.Fprintln(stderr, "coredns:", err)
		return 1
	}
	server.Wait()
	return 0
}
