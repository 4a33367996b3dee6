package vkcocoon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	certificates "k8s.io/api/certificates/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/certificate"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// clientsFor makes a client from credentials; tests replace it.
type clientsFor func(*rest.Config) (kubernetes.Interface, error)

func clientset(rc *rest.Config) (kubernetes.Interface, error) { return kubernetes.NewForConfig(rc) }

// nodeSubject is the certificate subject of a node, as the Node authorizer and NodeRestriction expect it.
func nodeSubject(name string) pkix.Name {
	return pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
}

// bootstrap gets the node its own identity: it asks the API server, with the credentials that all new nodes share, to
// sign a certificate for system:node:NAME, and writes the kubeconfig that uses it. It returns when the certificate
// exists, which needs an approver in the cluster. Until stop is called the certificate is renewed in time. client-go
// reloads renewed files by itself.
func (c Config) bootstrap(ctx context.Context, clients clientsFor, log *slog.Logger) (stop func(), err error) {
	from := c.BootstrapKubeconfig
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(c.Kubeconfig); err == nil {
			from = c.Kubeconfig // the shared credentials were removed after use, as they should be
		}
	}
	shared, err := clientcmd.BuildConfigFromFlags("", from)
	if err != nil {
		return nil, errdefs.Preconditionf("bootstrap kubeconfig %s: %w", from, err)
	}
	store, err := c.store("vk-client")
	if err != nil {
		return nil, err
	}
	m, err := certificate.NewManager(&certificate.Config{
		Template: &x509.CertificateRequest{Subject: nodeSubject(c.NodeName)}, SignerName: certificates.KubeAPIServerClientKubeletSignerName,
		Usages: []certificates.KeyUsage{certificates.UsageDigitalSignature, certificates.UsageClientAuth}, CertificateStore: store,
		ClientsetFn: func(current *tls.Certificate) (kubernetes.Interface, error) {
			if current == nil || current.Leaf == nil || time.Now().After(current.Leaf.NotAfter) {
				return clients(shared)
			}
			own := rest.AnonymousClientConfig(shared)
			own.CertFile, own.KeyFile = store.CurrentPath(), store.CurrentPath()
			return clients(own)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("set up the node's certificate: %w", err)
	}
	m.Start()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for told := false; m.Current() == nil; {
		if !told {
			log.Info("waiting for the cluster to sign the node's certificate (kubectl get csr)", "op", "bootstrap")
			told = true
		}
		select {
		case <-ctx.Done():
			m.Stop()
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
	if from == c.Kubeconfig {
		return m.Stop, nil
	}
	if err := writeKubeconfig(c.Kubeconfig, shared, store.CurrentPath()); err != nil {
		m.Stop()
		return nil, err
	}
	return m.Stop, nil
}

// writeKubeconfig writes credentials that use the certificate and key in pem. It does not replace credentials of
// another kind: FailedPrecondition.
func writeKubeconfig(path string, server *rest.Config, pem string) error {
	if there, err := clientcmd.LoadFromFile(path); err == nil {
		if a := there.AuthInfos["node"]; a == nil || a.ClientCertificate != pem {
			return errdefs.Preconditionf("kubeconfig %s was not written by a bootstrap, so it is not overwritten; move the file away, or set another path with --kubeconfig", path)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return errdefs.Preconditionf("read kubeconfig %s before overwriting it: %w", path, err)
	}
	ca, err := filepath.Abs(server.CAFile)
	if server.CAFile == "" {
		ca = ""
	} else if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	text, err := clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"cluster": {
			Server: server.Host, TLSServerName: server.ServerName, CertificateAuthority: ca, CertificateAuthorityData: server.CAData,
		}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"node": {ClientCertificate: pem, ClientKey: pem}},
		Contexts:       map[string]*clientcmdapi.Context{"node": {Cluster: "cluster", AuthInfo: "node"}},
		CurrentContext: "node",
	})
	if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	if err := atomicfile.WriteFile(path, text, 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

func (c Config) store(name string) (certificate.FileStore, error) {
	if err := os.MkdirAll(c.CertDir, 0o700); err != nil {
		return nil, errdefs.Preconditionf("create the folder of the node's certificates: %w", err)
	}
	store, err := certificate.NewFileStore(name, c.CertDir, c.CertDir, "", "")
	if err != nil {
		return nil, errdefs.Preconditionf("certificates in %s: %w", c.CertDir, err)
	}
	return store, nil
}

// serving makes the cluster sign the serving certificate of the kubelet API and renews it in time, until ctx ends. path
// is the file with certificate and key, which does not exist until an approver has approved the request.
func (c Config) serving(client kubernetes.Interface) (path string, run func(context.Context) error, err error) {
	store, err := c.store("vk-serving")
	if err != nil {
		return "", nil, err
	}
	request := &x509.CertificateRequest{Subject: nodeSubject(c.NodeName), DNSNames: []string{c.NodeName}}
	if ip := net.ParseIP(c.NodeIP); ip != nil {
		request.IPAddresses = []net.IP{ip}
	}
	m, err := certificate.NewManager(&certificate.Config{
		Template: request, SignerName: certificates.KubeletServingSignerName,
		Usages: []certificates.KeyUsage{certificates.UsageDigitalSignature, certificates.UsageServerAuth}, CertificateStore: store,
		ClientsetFn: func(*tls.Certificate) (kubernetes.Interface, error) { return client, nil },
	})
	if err != nil {
		return "", nil, fmt.Errorf("set up the serving certificate: %w", err)
	}
	return store.CurrentPath(), func(ctx context.Context) error {
		m.Start()
		<-ctx.Done()
		m.Stop()
		return ctx.Err()
	}, nil
}
